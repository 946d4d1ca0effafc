"""Ranks that would send each other ranges of different buffers hear of it when an optimizer is built."""

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig, plan_full_param_layout
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import RankMismatchError

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def built(rank: int, size: int, bucket_sizes: tuple[int, ...]) -> str:
    """Wrap with a layout that was planned for a bucket size of each rank's own; return what the build says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    planned, config = (
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=bucket_size
        )
        for bucket_size in (bucket_sizes[rank], 40)
    )
    try:
        layout = plan_full_param_layout(model, planned)
        wrapped = DistributedDataParallel(model, config, full_param_layout=layout)
        build_optimizer(wrapped, "adam", lr=0.1, sharding="distributed")
    except RankMismatchError as error:
        return str(error)
    return "built"


def test_other_buckets_are_named_on_all_ranks(launch) -> None:
    """With the ends of the buckets of both ranks."""
    for said in launch(built, 2, (40, 4000)):
        assert "ranks differ" in said
        assert "bucket ends" in said
    assert launch(built, 2, (40, 40)) == ["built", "built"]
