"""What is asked of matrices that are not there is named, once; what acts on one of them is not."""

import warnings
from typing import Any

import pytest
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import UnusedSettingWarning


class Block(nn.Module):
    """A hidden matrix between a table and a head, fused where asked."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(6, 8), nn.Linear(8, 24), nn.Linear(24, 6)
        self.table.weight.is_embedding_or_output_parameter = True
        self.head.weight.is_embedding_or_output_parameter = True
        self.body.weight.use_muon = True
        if fused:
            self.body.weight.is_qkv, self.body.weight.qkv_split_shapes = True, [4, 2, 2]


def unused(model: nn.Module, **settings: dict[str, Any]) -> Any:
    """Return what the report calls unused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnusedSettingWarning)
        return build_optimizer(model, "muon", lr=0.1, **settings).report().unused_settings


SPLIT = "no weight that Muon steps is fused, as far as its reader knows"


@pytest.mark.parametrize(
    ("settings", "plain", "fused"),
    [
        ({}, (), ()),
        ({"muon_split": "none"}, (f"muon_split='none': {SPLIT}",), ()),
        (
            {"muon_split_qkv": False},
            ("muon_split_qkv=False: no weight that Muon steps fuses query, key and value",),
            (),
        ),
        (
            {"muon_split": "none", "muon_split_qkv": False},
            (
                f"muon_split='none': {SPLIT}",
                "muon_split_qkv=False: muon_split='none' takes nothing apart",
            ),
            ("muon_split_qkv=False: muon_split='none' takes nothing apart",),
        ),
        (
            {"muon_tp_mode": "distributed"},
            ("muon_tp_mode='distributed': tensor parallelism cuts no matrix that Muon steps",),
            ("muon_tp_mode='distributed': tensor parallelism cuts no matrix that Muon steps",),
        ),
    ],
)
def test_what_no_matrix_needs_is_named(settings, plain, fused):
    """By the fused weights that there are, and by the axes that cut them."""
    assert unused(Block(), **settings) == plain
    assert unused(Block(fused=True), **settings) == fused


@pytest.mark.parametrize(("steps", "beyond"), [(1, "the last 2"), (2, "the last"), (3, None), (4, None)])
def test_triples_that_no_step_takes_are_named(steps: int, beyond: str | None) -> None:
    """Where there are more of them than steps; more steps start over."""
    settings: dict[str, Any] = {
        "muon_coefficient_type": "custom",
        "muon_coefficients": [(2, -1.5, 0.5)] * 3,
        "muon_num_ns_steps": steps,
    }
    named = unused(Block(), **settings)
    if beyond is None:
        assert named == ()
        return
    (text,) = named
    assert text.startswith("muon_coefficients=")
    assert text.endswith(f"muon_num_ns_steps={steps} takes the first {steps} triples, and not {beyond}")


def test_what_chooses_the_fallback_acts():
    """Parameters that Muon does not take follow them."""
    settings = {"muon_scalar_lr": 0.01, "muon_scalar_weight_decay": 0.02, "muon_momentum": 0.9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
        model[0].weight.use_muon = True
        report = build_optimizer(model, "muon", lr=0.1, **settings).report()
    assert {(row.optimizer, row.lr) for row in report.params} == {("muon", 0.1), ("adam", 0.01)}
    assert report.unused_settings == ()
