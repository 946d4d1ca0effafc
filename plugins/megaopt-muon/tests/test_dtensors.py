"""Muon's classes by themselves refuse DTensors when they are given them, not in the middle of a step."""

import pytest
import torch
import torch.distributed as dist
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from megaopt_testing.processes import run_ranks
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from megaopt_core.errors import ViewError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def refused(rank: int, world: int) -> list[str]:
    """Return what each class says of DTensors, in the constructor and in a group that is added."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    placements: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate())
    errors = []
    for cls in (TensorParallelMuon, TensorParallelAdaptiveMuon):
        for placement in placements:
            param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [placement]))
            optimizer = cls([nn.Parameter(torch.ones(2, 2))])
            with pytest.raises(ViewError) as constructed:
                cls([param])
            with pytest.raises(ViewError) as added:
                optimizer.add_param_group({"params": [param]})
            errors += [str(constructed.value), str(added.value)]
            assert len(optimizer.param_groups) == 1, rank
    return errors


def test_dtensors_are_refused_when_they_are_given() -> None:
    """Whatever their placement; the error says what steps them."""
    for errors in run_ranks(refused, 2):
        assert len(errors) == 12
        assert all("(4, 4) is a DTensor" in text and "build_optimizer" in text for text in errors)
