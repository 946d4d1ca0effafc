"""States that leave between phases of a run, and runs that go on from a checkpoint of offloaded states: the same bits.

Under every strategy, in place and offloaded, and in the midst of a step's backward passes, as reinforcement learning
does it.
"""

import contextlib
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from long_runs import sometimes

sys.path.insert(0, str(Path(__file__).parent / "layerwise"))
sys.path.insert(0, str(Path(__file__).parent / "fsdp"))

pytest.importorskip("megaopt_device")
pytest.importorskip("megaopt_layerwise")
pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
pytest.importorskip("megaopt_soap")
pytest.importorskip("megaopt_checkpoint")
import fsdp_runs
from layerwise_runs import PLAIN, blocks, wrapped
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from models import batch, loss_of

from megaopt_core import OptimizerConfig, get_megatron_optimizer
from megaopt_core.errors import UnsupportedOperationError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
AWARE = {"bf16": True, "use_precision_aware_optimizer": True}
STEPS, AWAY, SAVED = 5, (1, 3), 2


class Wrapped:
    """A model in DDP of torch's or ours, and its optimizer."""

    def __init__(
        self, size: int, name: str, sharding: str, wrapper: str, settings: Mapping[str, Any], seed: int = 0
    ) -> None:
        dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
        self.module = blocks(count=2, dtype=dtype, seed=seed)
        config = OptimizerConfig(optimizer=name, sharding=sharding, **{**PLAIN, **settings})
        self.model = wrapped(self.module, wrapper, config)
        self.optimizer = get_megatron_optimizer(config, [self.model])

    def backward(self, step: int, rank: int, *, last: bool) -> None:
        with contextlib.nullcontext() if last else self.model.no_sync():
            loss_of(self.model, batch(10 * step + last, rank)).backward()

    def values(self) -> dict[str, torch.Tensor]:
        if hasattr(self.model, "finish_param_sync"):
            self.model.finish_param_sync()
        return {name: param.detach().clone() for name, param in self.module.named_parameters()}


class Cut:
    """A model that `fully_shard` cuts, and its optimizer."""

    def __init__(
        self, size: int, name: str, sharding: str, wrapper: str, settings: Mapping[str, Any], seed: int = 0
    ) -> None:
        dtype = torch.bfloat16 if settings.get("bf16") else torch.float32
        mesh = fsdp_runs.mesh_of(dp=size)
        self.model = fsdp_runs.cut_model(mesh, seed=seed, dtype=dtype)
        self.optimizer = fsdp_runs.build(self.model, name, mesh, **settings)

    def backward(self, step: int, rank: int, *, last: bool) -> None:
        self.model(fsdp_runs.batch(10 * step + last, rank)).backward()

    def values(self) -> dict[str, torch.Tensor]:
        return {name: fsdp_runs.whole(param) for name, param in self.model.named_parameters()}


def trained(
    made: Wrapped | Cut, rank: int, steps: Iterable[int], *, away: Collection[int] = ()
) -> Wrapped | Cut:
    """Step on two backward passes each; in some steps states are away between them, and after the step."""
    for step in steps:
        made.backward(step, rank, last=False)
        if step in away:
            made.optimizer.offload_to_cpu()
            with pytest.raises(UnsupportedOperationError, match="restore_from_cpu"):
                made.optimizer.step_with_ready_grads()
            made.optimizer.restore_from_cpu()
        made.backward(step, rank, last=True)
        made.optimizer.step()
        made.optimizer.zero_grad()
        if step in away:
            made.optimizer.offload_to_cpu()
            made.optimizer.restore_from_cpu()
    return made


def phases(
    rank: int, size: int, runs: Mapping[str, tuple[str, str, str, Mapping[str, Any]]], folder: str
) -> dict[tuple[str, str, str], list[str]]:
    """Return, run by run, the parameters that differ from those of a run that was never disturbed."""
    warnings.simplefilter("ignore")  # a model on the CPU gains nothing
    found = {}
    for title, (name, sharding, wrapper, settings) in runs.items():
        kind = Cut if sharding == "fsdp" else Wrapped
        expected = trained(kind(size, name, sharding, wrapper, settings), rank, range(STEPS)).values()
        for offload in ({}, OFFLOAD):
            place = "offloaded" if offload else "in place"
            given = {**settings, **offload}
            moved = trained(kind(size, name, sharding, wrapper, given), rank, range(STEPS), away=AWAY)
            first = trained(kind(size, name, sharding, wrapper, given), rank, range(SAVED))
            path = f"{folder}/{title} {place}"
            first.optimizer.offload_to_cpu()
            save_checkpoint(path, first.model, first.optimizer)  # while states are away
            results = {"moved": moved}
            for other in (offload, {} if offload else OFFLOAD):
                second = kind(size, name, sharding, wrapper, {**settings, **other}, seed=1)
                load_checkpoint(path, second.model, second.optimizer)
                trained(second, rank, range(SAVED, STEPS))
                results[f"resumed {'offloaded' if other else 'in place'}"] = second
            for what, made in results.items():
                wrong = [key for key, value in made.values().items() if not torch.equal(value, expected[key])]
                if wrong:
                    found[title, place, what] = wrong
    return found


RUNS = {
    "adam": {
        "replicated": ("adam", "replicated", "torch", {}),
        "distributed": ("adam", "distributed", "torch", AWARE),
        "distributed, buffers": ("adam", "distributed", "buffers", {}),
        "fsdp": ("adam", "fsdp", "", {}),
    },
    "matrices": {
        "muon": ("muon", "layer_wise", "torch", {}),
        "muon, buffers": ("muon", "layer_wise", "buffers", AWARE),
        "soap, buffers": ("soap", "layer_wise", "buffers", {}),
        "muon, fsdp": ("muon", "fsdp", "", {}),
    },
}


@pytest.mark.parametrize("runs", sometimes(RUNS, always=["matrices"]))
def test_states_leave_and_come_back_under_every_strategy(launch, runs, tmp_path):
    """Also between two backward passes of a step; a checkpoint saved meanwhile is loaded by either kind of run."""
    assert launch(phases, 2, RUNS[runs], str(tmp_path), timeout=240) == [{}, {}]
