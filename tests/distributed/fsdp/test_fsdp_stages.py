"""Pipeline stages that `fully_shard` cuts: each has owners of its own, and one norm is that of all."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from fsdp_runs import OPTIMIZERS, alone, mesh_of, nothing_gathered, whole

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]
SHAPES = {"first": (13, 12), "second": (7, 20)}


def stage_of(name: str) -> nn.Module:
    """Return one stage, which holds one matrix and one bias."""
    chance = torch.Generator().manual_seed(len(name))
    rows, columns = SHAPES[name]
    stage = nn.Linear(columns, rows)
    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(torch.randn(param.shape, generator=chance))
    return stage


def viewed(model: nn.ModuleDict) -> nn.ModuleDict:
    """Say which parameters are matrices."""
    for stage in model.values():
        stage.weight.matrix_view = MatrixView()
    return model


def give(model: nn.Module, step: int) -> None:
    """Give gradients that depend on the step and the shape only."""
    for param in model.parameters():
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step + param.numel()))
        is_cut = hasattr(param, "device_mesh")
        param.grad = distribute_tensor(grad, param.device_mesh, param.placements) if is_cut else grad


def staged(rank: int, size: int) -> None:
    """Step two stages on two ranks each, and both in one process."""
    mesh = mesh_of(pp=2, dp=2)
    name = list(SHAPES)[mesh.get_local_rank("pp")]
    kind, settings = OPTIMIZERS["muon"]
    settings = {"lr": 0.01, "weight_decay": 0.1, "clip_grad": 1.0} | settings
    reference = viewed(nn.ModuleDict({each: stage_of(each) for each in SHAPES}))
    model = nn.ModuleDict({name: fully_shard(stage_of(name), mesh=mesh["dp"])})
    theirs = build_optimizer(reference, kind, pg_collection=alone(), **settings)
    ours = build_optimizer(viewed(model), kind, pg_collection=mesh, **settings)
    for step in range(4):
        give(reference, step)
        give(model, step)
        with nothing_gathered():
            norm = ours.step().grad_norm
        assert norm == pytest.approx(theirs.step().grad_norm, rel=1e-6)
    for at, param in model.named_parameters():
        torch.testing.assert_close(whole(param), reference.get_parameter(at).detach(), rtol=0, atol=1e-6)
    assert {row.owner for row in ours.report().params if row.travels} <= {"dp 0", "dp 1"}


def test_every_stage_has_its_own_owners(launch) -> None:
    """Two stages of two ranks train as in one process."""
    launch(staged, 4)
