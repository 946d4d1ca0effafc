"""Direct exchanges and the backend's own collectives do the same."""

import pytest
import torch
import torch.distributed as dist
from megaopt_distributed.buffers import point_to_point
from megaopt_distributed.buffers.collectives import Native, communicator
from megaopt_distributed.buffers.communicator import shard_of
from megaopt_distributed.buffers.point_to_point import PointToPoint

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes: whole numbers, so that every order of additions has one result."""
    return (torch.arange(numel) % 7 + rank).to(dtype)


def everything(rank: int, size: int, dtype: torch.dtype) -> list[tuple[str, str, bool]]:
    """Run all collectives of both kinds, with several under way at a time; return what is wrong."""
    point_to_point.CHUNK = 64
    numel = 300 * size
    total = sum(values(other, numel, dtype) for other in range(size))
    wrong = []
    for kind in (PointToPoint, Native):
        comm = kind(dist.group.WORLD)
        for average in (False, True) if kind is PointToPoint else (False,):
            expected = total / size if average else total
            buckets = [values(rank, numel, dtype) for _ in range(3)]
            pending = [comm.reduce_scatter(bucket, average=average) for bucket in buckets]
            for work in pending:
                work.wait()
                work.wait()
            good = [
                torch.equal(shard_of(bucket, rank, size), shard_of(expected, rank, size))
                for bucket in buckets
            ]
            wrong += [(kind.__name__, "reduce_scatter", average)] * (not all(good))
            bucket = values(rank, numel, dtype)
            comm.all_reduce(bucket, average=average).wait()
            wrong += [(kind.__name__, "all_reduce", average)] * (not torch.equal(bucket, expected))
        bucket = torch.zeros(numel, dtype=dtype)
        shard_of(bucket, rank, size).copy_(shard_of(total, rank, size))
        comm.all_gather(bucket).wait()
        wrong += [(kind.__name__, "all_gather")] * (not torch.equal(bucket, total))
    wrong += (
        [] if isinstance(communicator(dist.group.WORLD, torch.device("cpu")), PointToPoint) else ["choice"]
    )
    return wrong


def unequal(rank: int, size: int) -> list[str]:
    """Shards of unequal sizes, one of them empty; return what is wrong."""
    point_to_point.CHUNK = 64
    ends = (130, 130, 400)
    total = sum(values(other, 400, torch.float32) for other in range(size))
    wrong = []
    # gloo's own collectives want equal shards.
    comm = PointToPoint(dist.group.WORLD)
    bucket = values(rank, 400, torch.float32)
    comm.reduce_scatter(bucket, ends).wait()
    mine = shard_of(bucket, rank, size, ends)
    wrong += ["reduce_scatter"] * (not torch.equal(mine, shard_of(total, rank, size, ends)))
    gathered = torch.zeros(400)
    shard_of(gathered, rank, size, ends).copy_(shard_of(total, rank, size, ends))
    comm.all_gather(gathered, ends).wait()
    wrong += ["all_gather"] * (not torch.equal(gathered, total))
    return wrong


def test_shards_may_be_unequal(launch):
    """One rank has a third, one nothing, one the rest."""
    assert launch(unequal, 3) == [[], [], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_collectives_add_up_and_gather(launch, dtype):
    """Three ranks, chunks that do not divide the shards, several collectives at a time."""
    assert launch(everything, 3, dtype) == [[], [], []]
