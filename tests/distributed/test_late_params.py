"""What one rank alone cannot step stops the step of all that share parameters out with it, before anything moves."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import values_of
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import OwnershipError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def unfrozen_on_one(rank: int, size: int, settings: Mapping[str, Any], staged: bool) -> tuple[str, bool]:
    """Unfreeze a layer on rank 1 after one step; return what the next step raises, and whether anything moved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    model[0].requires_grad_(False)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=40)
    wrapped = DistributedDataParallel(model, config)
    optimizer = build_optimizer(wrapped, "adam", lr=0.1, sharding="distributed", **settings)

    def backward():
        wrapped(torch.ones(3, 6)).square().sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    if rank == 1:
        model[0].weight.requires_grad_(True)
        model[0].weight.grad = torch.ones(8, 6)
    before = values_of(model)
    try:
        optimizer.prepare_grads() if staged else optimizer.step()
    except OwnershipError as error:
        after = values_of(model)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
    return "no error", False


@pytest.mark.parametrize("staged", [False, True], ids=["step", "prepare_grads"])
@pytest.mark.parametrize("settings", [{"clip_grad": 0.0}, {"clip_grad": 1.0}], ids=str)
def test_all_ranks_raise(launch, settings, staged):
    """Also in fp32 without clipping, where no norm is exchanged."""
    (other, other_still), (own, own_still) = launch(unfrozen_on_one, 2, settings, staged, group_timeout=250.0)
    assert "'0.weight' trains since the optimizer was built" in own
    assert "another rank cannot step what trains now" in other
    assert own_still
    assert other_still
