"""Roles and views of torchtitan's own models, as they are built and after `Module.parallelize`."""

import pytest
import titan_harness as harness
import torch

from megaopt_core.params import MatrixView, Role, named_params
from megaopt_core.routing import infer_roles

pytestmark = pytest.mark.distributed

MESHES = {
    "FSDP2": (2, {}),
    "TP": (2, {"tensor_parallel_degree": 2}),
    "EP": (2, {"expert_parallel_degree": 2}),
    "TP and EP": (4, {"tensor_parallel_degree": 2, "expert_parallel_degree": 2}),
}

CASES = [
    (model, mesh)
    for model in ("llama3", "deepseek_v3")
    for mesh in MESHES
    if model != "llama3" or "EP" not in mesh
]
"""Llama has no experts."""


def _seen(model: torch.nn.Module) -> dict[str, tuple[Role, MatrixView | None, bool]]:
    found = infer_roles(model)
    return {entry.name: (found[entry.name].role, found[entry.name].view, found[entry.name].uncertain)
            for entry in named_params(model)}  # fmt: skip


def _built(rank: int, size: int, model: str, layers: int) -> dict[str, tuple[Role, MatrixView | None, bool]]:
    with torch.device("meta"):
        return _seen(harness.model(model, layers).model.build())


def _parallelized(
    rank: int, size: int, model: str, given: dict
) -> dict[str, tuple[Role, MatrixView | None, bool]]:
    made = harness.trainer(harness.titans(), model, spmd_backend="partial_dtensor", **given)
    return _seen(made.model_parts[0])


@pytest.mark.parametrize("model", ["llama3", "deepseek_v3"])
def test_every_hidden_matrix_is_certain(launch, model) -> None:
    """Embedding and output layer are told apart from the matrices, fused ones are split, and none is in doubt."""
    found = launch(_built, 1, model, 2)[0]
    # DeepSeek's debug model has as many tokens as `wo` takes features, which leaves its output layer in doubt.
    assert {name for name, (_, _, uncertain) in found.items() if uncertain} <= {"lm_head.weight"}
    ends = {name: role for name, (role, _, _) in found.items() if role in (Role.EMBEDDING, Role.OUTPUT)}
    assert ends == {"tok_embeddings.weight": Role.EMBEDDING, "lm_head.weight": Role.OUTPUT}
    matrices = {name for name, (role, _, _) in found.items() if role is Role.MATRIX}
    assert len(matrices) == {"llama3": 10, "deepseek_v3": 18}[model]
    splits = {view.split_sizes for _, view, _ in found.values() if view is not None and view.split_sizes}
    assert splits == {"llama3": {(16, 16, 16)}, "deepseek_v3": {(512, 64), (128, 128)}}[model]
    stacks = {name.split(".")[-1] for name, (_, view, _) in found.items() if view and view.batch_dims}
    assert stacks == ({"w1_EFD", "w2_EDF", "w3_EFD"} if model == "deepseek_v3" else set())


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_parallelism_changes_no_role_and_no_view(launch, model, mesh) -> None:
    """As of the bare model, on every rank."""
    size, given = MESHES[mesh]
    bare = launch(_built, 1, model, 2)[0]
    assert launch(_parallelized, size, model, given) == [bare] * size
