"""Owners step whole matrices to the bits of a replicated optimizer."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
from layerwise_runs import differing, several

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1500}
OVERLAPS = {**OVERLAP, "overlap_param_gather": True}
GATHER = {"overlap_param_gather": True}
EARLY = {"overlap_param_gather_with_optimizer_step": True}
OPTIMIZERS = ("muon", "adaptive_muon", "soap")
STATES = {"muon": "momentum_buffer", "adaptive_muon": "momentum_buffer", "soap": "exp_avg"}


def ways(
    optimizer: str, dtype: torch.dtype, **options: Any
) -> dict[str, tuple[tuple[str, str, str], dict[str, Any]]]:
    """Return runs that must end with the same bits."""
    settings = {"bf16": True} if dtype is torch.bfloat16 else {}
    given = {"model": {"dtype": dtype, **options.pop("model", {})}, **options}

    def run(sharding, wrapper, ddp=None, **more):
        return (optimizer, sharding, wrapper), {
            "ddp": ddp,
            "settings": {**settings, **options.get("settings", {}), **more},
            **{key: value for key, value in given.items() if key != "settings"},
        }

    return {
        "expected": run("replicated", "torch"),
        "torch's DDP": run("layer_wise", "torch"),
        "torch's DDP, gathered in the step": run("layer_wise", "torch", **EARLY),
        "our DDP, whole gradients": run("layer_wise", "whole gradients"),
        "buffers": run("layer_wise", "buffers"),
        "buffers, buckets": run("layer_wise", "buffers", OVERLAP),
        "buffers, overlaps": run("layer_wise", "buffers", OVERLAPS, **GATHER),
        "buffers, all overlaps": run("layer_wise", "buffers", OVERLAPS, **GATHER, **EARLY),
    }


@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    sometimes(
        itertools.product(OPTIMIZERS, [torch.float32, torch.bfloat16]),
        always=[("adaptive_muon", torch.float32), ("soap", torch.float32)],
    ),
)
def test_two_ranks_make_the_bits_of_a_replicated_optimizer(launch, optimizer, dtype):
    """Parameters, main parameters and state; adam steps the rest."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    runs = ways(optimizer, dtype)
    results = launch(several, 2, runs)
    expected, said = results[0]["expected"]
    assert f"last.weight/{STATES[optimizer]}" in expected
    wrong = {
        (name, rank): differing(expected, result[name][0])
        for name in runs
        for rank, result in enumerate(results)
    }
    assert {where: names for where, names in wrong.items() if names} == {}
    assert {result[name][1] for result in results for name in runs} == {said}
