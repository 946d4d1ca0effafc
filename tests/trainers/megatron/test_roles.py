"""Roles and views of Megatron-core's own models, as they are built: nothing marks a weight for Muon."""

import megatron_harness as harness
import pytest

from megaopt_core.params import MatrixView, Role
from megaopt_core.routing import infer_roles

pytestmark = pytest.mark.distributed

GROUPED = {"num_query_groups": 2, "kv_channels": 8, "gated_linear_unit": True}
MODELS = {
    "tied": ("gpt", {}, {}),
    "untied": ("gpt", {}, {"tied": False}),
    "experts": ("gpt", harness.MOE, {"tied": False}),
    "grouped queries": ("gpt", GROUPED, {"tied": False, "positions": "rope"}),
    "hybrid": ("hybrid", {"num_layers": 4}, {}),
}


def _seen(rank: int, size: int, case: str) -> dict[str, tuple[Role, MatrixView | None, bool, int]]:
    harness.start()
    kind, settings, given = MODELS[case]
    model = getattr(harness, kind)(harness.transformer_config(**settings), **given)
    dims = {name: param.dim() for name, param in model.named_parameters()}
    return {
        name: (said.role, said.view, said.uncertain, dims[name]) for name, said in infer_roles(model).items()
    }


@pytest.mark.parametrize("case", MODELS)
def test_every_hidden_matrix_is_certain(launch, case) -> None:
    """Embeddings, positions and output layer are no matrices; every other weight is, and q/k/v are taken apart."""
    found = launch(_seen, 1, case)[0]
    assert not [name for name, (_, _, uncertain, _) in found.items() if uncertain]
    ends = ("word_embeddings.weight", "position_embeddings.weight", "output_layer.weight")
    hidden = {name for name, (_, _, _, dims) in found.items() if dims > 1 and not name.endswith(ends)}
    assert hidden == {name for name, (role, _, _, _) in found.items() if role is Role.MATRIX}
    qkv = {view.split_sizes for name, (_, view, _, _) in found.items() if "linear_qkv.weight" in name}
    assert qkv == {(16, 8, 8) if case == "grouped queries" else (8, 8, 8)}
    if case == "grouped queries":
        assert found["decoder.layers.0.mlp.linear_fc1.weight"][1].split_sizes == (128, 128)
