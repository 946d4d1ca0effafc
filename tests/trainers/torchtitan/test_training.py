"""Whole runs of torchtitan's Trainer: ours beside its own AdamW."""

import pytest
import titan_harness as harness

pytestmark = pytest.mark.distributed

MESHES = {"FSDP2": (2, {}), "TP": (2, {"tensor_parallel_degree": 2})}


def _runs(rank: int, size: int, names: list[str], given: dict) -> list[harness.Run]:
    # Its default keeps meshes for the whole process, in which there are several trainers here.
    given = {"spmd_backend": "partial_dtensor", **given}
    runs = [harness.Run.of(harness.trainer(getattr(harness, name)(), **given)) for name in names]
    return runs if rank == 0 else []


@pytest.mark.parametrize("mesh", MESHES)
def test_adam_is_torchtitans_adamw(launch, mesh) -> None:
    """Losses, learning rates and weights, to 1e-6."""
    size, given = MESHES[mesh]
    theirs, ours = launch(_runs, size, ["titans", "adam"], given)[0]
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-6)
    assert [set(rates) for rates in ours.rates] == [set(rates) for rates in theirs.rates]
    assert harness.far(ours.weights, theirs.weights) < 1e-6
