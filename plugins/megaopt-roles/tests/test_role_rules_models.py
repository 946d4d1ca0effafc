"""Whole models, written the way people write them."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from megaopt_core.params import MatrixView, Role
from megaopt_core.routing import infer_roles

_spec = importlib.util.spec_from_file_location("role_models", Path(__file__).with_name("role_models.py"))
assert _spec is not None
assert _spec.loader is not None
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

E, O, X = Role.EMBEDDING, Role.OUTPUT, Role.ELEMENTWISE  # noqa: E741 - a table of one-letter roles reads best
M, T = MatrixView(), MatrixView(transposed=True)


def split(*sizes: int, **view: Any) -> MatrixView:
    """Return a split view."""
    return MatrixView(split_sizes=sizes, **view)


# What is not listed has one dimension and is element-wise.
EXPECTED = {
    "gpt, untied": (
        lambda: models.HandGPT(tied=False),
        {
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            **{f"transformer.h.{i}.c_attn.weight": split(32, 32, 32) for i in range(2)},
            **{f"transformer.h.{i}.c_proj.weight": M for i in range(2)},
            **{f"transformer.h.{i}.mlp.{j}.weight": M for i in range(2) for j in (0, 2)},
            "lm_head.weight": O,
        },
    ),
    "gpt, tied": (
        lambda: models.HandGPT(tied=True),
        {
            "transformer.wte.weight": E,
            "transformer.wpe.weight": E,
            **{f"transformer.h.{i}.c_attn.weight": split(32, 32, 32) for i in range(2)},
            **{f"transformer.h.{i}.c_proj.weight": M for i in range(2)},
            **{f"transformer.h.{i}.mlp.{j}.weight": M for i in range(2) for j in (0, 2)},
        },
    ),
    "tied head registered first": (models.HeadFirst, {"head.weight": E, "body.weight": M}),
    "hidden layers share a weight": (
        models.SharedLayers,
        {"tokens.weight": E, "first.weight": M, "head.weight": O},
    ),
    "experts by einsum": (
        models.EinsumExperts,
        {
            "router.weight": M,
            "w_in": MatrixView(batch_dims=1, transposed=True),
            "b_in": X,
            "w_out": MatrixView(batch_dims=1),
        },
    ),
    "experts by bmm": (
        models.BmmExperts,
        {
            "gate_up": split(12, 12, batch_dims=1, transposed=True),
            "down": MatrixView(batch_dims=1, transposed=True),
        },
    ),
    "experts one by one": (
        lambda: torch.nn.Sequential(models.LoopExperts(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)),
        {
            "0.gate": M,
            "0.gate_up": split(1, 1, batch_dims=1),
            "0.gate_up_bias": X,
            "0.down": MatrixView(batch_dims=1),
            "2.weight": O,
        },
    ),
    "recommender": (
        models.Recommender,
        {
            "tables.0.weight": E,
            "tables.1.weight": E,
            "bottom.0.weight": M,
            "bottom.2.weight": M,
            "top.0.weight": M,
            "top.2.weight": O,
        },
    ),
    "bare tables": (models.Factorization, {"users": E, "items": E, "bias": X}),
    "vision": (
        models.Vision,
        {
            "cls_token": X,
            "pos_embed": X,
            "queries": X,
            "row_bias": X,
            "gain": X,
            "patch.weight": M,
            "cross.in_proj_weight": split(16, 16, 16),
            "cross.out_proj.weight": M,
            "head.weight": O,
        },
    ),
    "actor and critic": (
        models.ActorCritic,
        {"trunk.0.weight": M, "trunk.2.weight": M, "actor.weight": O, "critic.weight": O},
    ),
    "variational autoencoder": (
        models.VAE,
        {"enc.weight": M, "mu.weight": O, "logvar.weight": O, "dec.weight": M, "out.weight": O},
    ),
    "sequence to sequence": (
        models.Seq2Seq,
        {
            "src.weight": E,
            "tgt.weight": E,
            "encoder.weight_ih_l0": split(16, 16, 16, 16),
            "encoder.weight_hh_l0": split(16, 16, 16, 16),
            "score.weight": M,
            "cell.weight_ih": split(16, 16, 16, 16),
            "cell.weight_hh": split(16, 16, 16, 16),
            "fc_out.weight": O,
        },
    ),
    "mixer without a head": (
        models.Encoder,
        {f"blocks.{i}.{part}.{j}.weight": M for i in (0, 1) for part in ("token", "channel") for j in (0, 2)},
    ),
    "diffusion transformer": (
        models.DiT,
        {
            "x_embed.weight": M,
            "ada.1.weight": split(*[16] * 6),
            "attn.weight": M,
            "mlp.weight": M,
            "final_ada.1.weight": split(16, 16),
            "final.weight": O,
        },
    ),
    "graph convolutions": (models.GCN, {"gc1.weight": T, "gc2.weight": O}),
    "unusual layers": (
        models.Adapted,
        {
            "first.weight": M,
            "second.lora_a": M,
            "second.lora_b": M,
            "second.scale": X,
            "second.linear.weight": M,
            "bilinear.weight": M,
            "head.weight": O,
        },
    ),
    "state space": (
        models.StateSpaceModel,
        {
            "tokens.weight": E,
            "mixer.in_proj.weight": split(16, 16),
            "mixer.conv1d.weight": X,
            "mixer.x_proj.weight": split(2, 4, 4),
            "mixer.dt_proj.weight": M,
            "mixer.A_log": X,
            "mixer.out_proj.weight": M,
            "head.weight": O,
        },
    ),
    "u-net": (
        models.UNet,
        {
            "down.0.weight": M,
            "middle.weight": split(4, 4, 4, 4),
            "depthwise.weight": X,
            "up.weight": T,
            "out.weight": O,
        },
    ),
    "siamese": (models.Siamese, {"conv.weight": M, "fc1.weight": M, "fc2.weight": O}),
    "layers by name, heads in a dictionary": (
        models.DeepHead,
        {
            "tokens.weight": E,
            **{f"layer{i}.weight": M for i in range(3)},
            "tasks.a.weight": O,
            "tasks.b.weight": O,
            "matrices.0": T,
            "matrices.1": T,
        },
    ),
    "everything functional": (
        models.FunctionalHead,
        {
            "tokens": E,
            "positions": X,
            "w_q": T,
            "w_kv": split(8, 8, transposed=True),
            "w_o": MatrixView(transposed=True, first_dims=2),
            "unembed": O,
        },
    ),
}

DOUBTFUL = {
    # One product sums over its heads and their features; one that sums over experts would be written the same.
    "everything functional": ["w_o"],
    # A layer of experts by itself is written like an ensemble of models, whose last stack is a head.
    "experts by einsum": ["w_out"],
    "experts by bmm": ["down"],
    # They are returned as they are, and the decoder takes them.
    "variational autoencoder": ["mu.weight", "logvar.weight"],
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", EXPECTED)
def test_every_parameter_is_seen_for_what_it_is(case, device):
    """Every parameter of more than one dimension has the role and the view that its use gives it, and surely."""
    factory, expected = EXPECTED[case]
    with torch.device(device):
        model = factory()
    decisions = infer_roles(model)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    found = {
        name: decision.view if decision.role is Role.MATRIX else decision.role
        for name, decision in decisions.items()
        if len(shapes[name]) > 1
    }
    assert found == expected
    assert [name for name, decision in decisions.items() if decision.uncertain] == DOUBTFUL.get(case, [])
    assert all(decisions[name].role is Role.ELEMENTWISE for name, shape in shapes.items() if len(shape) < 2)


@pytest.mark.parametrize("case", EXPECTED)
def test_views_fit(case):
    """Every view gives matrices of the parameter that it describes."""
    model = EXPECTED[case][0]()
    decisions = infer_roles(model)
    for name, param in model.named_parameters():
        view = decisions[name].view
        if view is not None:
            assert sum(matrix.numel() for matrix in view.matrices(param.detach())) == param.numel()


@pytest.mark.parametrize(
    ("factory", "name", "view"),
    [
        (models.GroupedQuery, "qkv.weight", split(8, 4, 4)),
        (models.Rotary, "q.weight", M),
        (models.Rotary, "k.weight", M),
    ],
)
def test_layouts_of_attention(factory, name, view):
    """Grouped q, k and v repeat per group; the halves of a rotary embedding are one matrix."""
    decision = infer_roles(factory())[name]
    assert decision.view == view
    assert not decision.uncertain
