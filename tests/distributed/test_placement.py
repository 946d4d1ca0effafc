"""Offloaded, every strategy trains to the bits of a replicated optimizer in place."""

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent / "layerwise"))

pytest.importorskip("megaopt_device")
pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_muon")
pytest.importorskip("megaopt_soap")
from layerwise_runs import differing, several

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::megaopt_core.errors.UnusedSettingWarning"),
]

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
PRECISIONS = {
    "fp32": {},
    "main": {"bf16": True},
    "remainders": {"bf16": True, "use_precision_aware_optimizer": True},
}
SHARDED = {"adam": "distributed", "muon": "layer_wise", "soap": "layer_wise"}
EARLY = {"overlap_param_gather_with_optimizer_step": True}


def quietly(rank: int, size: int, runs: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Do several runs; that a model on the CPU gains nothing is known."""
    import warnings

    warnings.simplefilter("ignore")
    return several(rank, size, runs)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    sometimes(
        itertools.product(SHARDED, PRECISIONS),
        always=[("adam", "remainders"), ("muon", "main")],
    ),
)
def test_two_ranks_make_the_bits_of_a_replicated_optimizer_in_place(launch, optimizer, precision):
    """Under torch's DDP and in buffers, gathered in the step or after it, with all and with a part on the CPU."""
    settings = PRECISIONS[precision]
    model = {"dtype": torch.bfloat16 if settings else torch.float32}

    def run(sharding, wrapper="torch", **more):
        return (optimizer, sharding, wrapper), {"settings": {**settings, **more}, "model": model}

    sharding = SHARDED[optimizer]
    runs = {
        "in place": run("replicated"),
        "replicated": run("replicated", **OFFLOAD),
        "torch's DDP": run(sharding, **OFFLOAD),
        "buffers": run(sharding, "buffers", **OFFLOAD),
        "buffers, half": run(sharding, "buffers", **{**OFFLOAD, "optimizer_offload_fraction": 0.5}),
        "buffers, overlap": run(sharding, "buffers", **OFFLOAD, **EARLY, overlap_cpu_optimizer_d2h_h2d=True),
    }
    results = launch(quietly, 2, runs)
    expected, said = results[0]["in place"]
    wrong = {
        (name, rank): differing(expected, result[name][0])
        for name in runs
        for rank, result in enumerate(results)
    }
    assert {where: names for where, names in wrong.items() if names} == {}
    assert {result[name][1] for result in results for name in runs} == {said}
