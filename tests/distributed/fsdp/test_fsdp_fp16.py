"""Models in float16 that `fully_shard` has cut: the loss scale, and gradients that overflow on one rank."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from long_runs import sometimes
from torch.distributed.device_mesh import DeviceMesh

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import (
    ThirdParty,
    alone,
    batch,
    build,
    cut_model,
    mesh_of,
    nothing_gathered,
    whole,
    whole_model,
)

pytest.importorskip("megaopt_fsdp")
from megaopt_testing import temporary_plugin

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

OVERFLOWS = {1: (1, "blocks.0.down.weight", float("inf")), 4: (0, "first.bias", float("nan"))}
"""Step to the rank whose shard of a parameter gets a number that is not finite."""
SCALES = [512.0, 256.0, 256.0, 512.0, 256.0, 256.0, 512.0]
"""After each step, where two good steps double the scale and each overflow halves it."""
SETTINGS = {
    "fp16": True,
    "initial_loss_scale": 512.0,
    "min_loss_scale": 1.0,
    "loss_scale_window": 2.0,
    "hysteresis": 1,
}


def scaled_runs(rank: int, size: int, dims: dict[str, int]) -> None:
    """Train with an optimizer that steps elements, and with one whose owners step whole matrices."""
    mesh = mesh_of(**dims)
    with temporary_plugin(ThirdParty(), name="third-party"):
        for kind in ("adam", "newcomer"):
            scaled_run(rank, size, kind, mesh)


def scaled_run(rank: int, size: int, kind: str, mesh: DeviceMesh) -> None:
    """Train a cut model, and a whole one with its gradients."""
    reference, model = whole_model(dtype=torch.float16), cut_model(mesh, dtype=torch.float16)
    theirs, ours = build(reference, kind, alone(), **SETTINGS), build(model, kind, mesh, **SETTINGS)
    scales = []
    for step in range(len(SCALES)):
        ours.zero_grad()
        ours.scale_loss(model(batch(step, rank))).backward()
        overflow(model, rank, step)
        for name, param in model.named_parameters():
            reference.get_parameter(name).grad = whole(param.grad)
        if step in OVERFLOWS:
            _, name, value = OVERFLOWS[step]
            reference.get_parameter(name).grad.view(-1)[0] = value
        before = {name: whole(param) for name, param in model.named_parameters()}
        with nothing_gathered():
            result = ours.step()
        expected = theirs.step()
        assert result.update_successful is expected.update_successful is (step not in OVERFLOWS)
        assert result.grad_norm == (
            None if step in OVERFLOWS else pytest.approx(expected.grad_norm, rel=1e-6)
        )
        scales.append(float(ours.get_loss_scale()))
        assert scales[-1] == float(theirs.get_loss_scale())
        for name, param in model.named_parameters():
            here = whole(param)
            assert torch.equal(here, before[name]) or step not in OVERFLOWS, name
            torch.testing.assert_close(here, reference.get_parameter(name).detach(), rtol=0, atol=1e-3)
    assert scales == SCALES
    of_all = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(of_all, ours.get_loss_scale())
    assert len(set(map(float, of_all))) == 1


def overflow(model: torch.nn.Module, rank: int, step: int) -> None:
    """Put a number that is not finite into what one rank has of a gradient."""
    at, name, value = OVERFLOWS.get(step, (None, "", 0.0))
    if rank == at:
        model.get_parameter(name).grad.to_local().view(-1)[0] = value


@pytest.mark.parametrize("dims", sometimes([{"dp": 2}, {"dp_replicate": 2, "dp": 2}], [{"dp": 2}]), ids=str)
def test_all_ranks_skip_and_scale_alike(launch, dims) -> None:
    """Whichever rank finds the overflow, nothing changes on any, and the scale goes as in one process."""
    launch(scaled_runs, math.prod(dims.values()), dims)
