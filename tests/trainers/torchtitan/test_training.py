"""Whole runs of torchtitan's Trainer: our Adam beside its own AdamW, our Muon beside a bare model in one process."""

import functools
from collections.abc import Callable

import pytest
import titan_harness as harness
import torch.distributed as dist

pytestmark = pytest.mark.distributed

MESHES = {
    "FSDP2": (2, {}),
    "TP": (2, {"tensor_parallel_degree": 2}),
    "HSDP": (4, {"data_parallel_replicate_degree": 2}),
    "FSDP2 x TP": (4, {"tensor_parallel_degree": 2}),
    "EP x FSDP2 of experts": (4, {"expert_parallel_degree": 2}),
    "HSDP, EP": (4, {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}),
    "FSDP2 x TP, EP of all ranks": (4, {"tensor_parallel_degree": 2, "expert_parallel_degree": 4}),
}
"""Name to the number of ranks, and the fields of torchtitan's configuration."""

ONE_PROCESS_FOR_ALL = "partial_dtensor"
"""The backend that lets several trainers live in one process; the default keeps meshes."""

CASES = [
    ("llama3", "FSDP2", ONE_PROCESS_FOR_ALL),
    ("llama3", "TP", ONE_PROCESS_FOR_ALL),
    ("llama3", "HSDP", ONE_PROCESS_FOR_ALL),
    ("llama3", "FSDP2 x TP", "spmd_types"),
    ("deepseek_v3", "EP x FSDP2 of experts", "spmd_types"),
    ("deepseek_v3", "HSDP, EP", ONE_PROCESS_FOR_ALL),
    ("deepseek_v3", "FSDP2 x TP, EP of all ranks", ONE_PROCESS_FOR_ALL),
]

MATRICES = {"llama3": 10, "deepseek_v3": 18}
"""How many of the parameters Muon steps."""


def _run(model: str, name: str, given: dict) -> tuple[harness.Run, float, int]:
    """Return a run; of Muon how far the first rank is from one process with the same gradients, and what it steps."""
    made = harness.trainer(getattr(harness, name)(), model, **given)
    run = harness.Run.of(made, keeps_grads=name == "muon")
    if name != "muon":
        return run, 0.0, 0
    (optimizer,) = made.optimizers
    stepped = [entry for entry in optimizer.routing.params.values() if entry.spec.optimizer == "muon"]
    far = harness.far(run.weights, harness.muon_alone(model, run)) if dist.get_rank() == 0 else 0.0
    run.grads.clear()
    return run, far, len(stepped)


def _runs(rank: int, size: int, model: str, names: list[str], given: dict) -> list:
    found = [_run(model, name, given) for name in names]
    return found if rank == 0 else []


@functools.cache
def _losses_of_one_process(launch: Callable[..., list], model: str) -> list[float]:
    return launch(_runs, 1, model, ["muon"], {"spmd_backend": ONE_PROCESS_FOR_ALL})[0][0][0].losses


@pytest.mark.parametrize(("model", "mesh", "backend"), CASES)
def test_ranks_change_nothing(launch, model, mesh, backend) -> None:
    """Adam is torchtitan's AdamW to 1e-6; Muon steps all hidden matrices as one process does with these gradients."""
    size, given = MESHES[mesh]
    names = ["titans", "adam", "muon"]
    together = [names] if backend == ONE_PROCESS_FOR_ALL else [[name] for name in names]
    found = [
        each
        for some in together
        for each in launch(_runs, size, model, some, {"spmd_backend": backend, **given})[0]
    ]
    (theirs, *_), (adam, *_), (muon, far, count) = found
    assert adam.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert [set(rates) for rates in adam.rates] == [set(rates) for rates in theirs.rates]
    assert harness.far(adam.weights, theirs.weights) < 1e-6
    assert count == MATRICES[model]
    assert far < 1e-6
    assert muon.losses == pytest.approx(_losses_of_one_process(launch, model), rel=1e-5)
