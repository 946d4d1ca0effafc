"""The three collectives of data parallelism, in the form that is fastest on each backend.

Every collective works in place on one flat tensor, whose n-th part is the shard of the group's n-th rank, and returns
at once. Gloo moves the shards of a reduce-scatter or an all-gather one after the other; here every pair of
ranks exchanges them directly, all at the same time. Other backends use their own collectives.
`benchmarks/collectives.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, override

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from megaopt_core.parallel import needs_all_ranks, rank_in, size_of
from megaopt_distributed.buffers.communicator import DONE, Communicator, Pending, shard_of
from megaopt_distributed.buffers.point_to_point import PointToPoint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Alone", "Native", "Rooted", "communicator"]

_EQUAL_SHARDS = frozenset({"fake"})
"""Backends whose `all_gather` and `reduce_scatter` take tensors of one size alone."""


@frozen
class Alone:
    """One rank: nothing to do."""

    size: int = 1
    rank: int = 0

    def reduce_scatter(
        self, bucket: torch.Tensor, ends: Sequence[int] = (), *, average: bool = False
    ) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
            ends: of the only shard.
            average: of one rank.
        """
        return DONE

    def all_gather(self, bucket: torch.Tensor, ends: Sequence[int] = ()) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
            ends: of the only shard.
        """
        return DONE

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Leave the tensor as it is.

        Args:
            bucket: the tensor.
            average: not used.
        """
        return DONE


@define(eq=False)
class Native:
    """The backend's own collectives.

    Args:
        group: the process group.
    """

    group: ProcessGroup
    size: int = field(init=False)
    rank: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.size, self.rank = size_of(self.group), rank_in(self.group)

    def reduce_scatter(
        self, bucket: torch.Tensor, ends: Sequence[int] = (), *, average: bool = False
    ) -> Pending:
        """Call `reduce_scatter_tensor`, or `reduce_scatter` where shards are unequal.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
            average: use the backend's AVG.
        """
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        shards = self._shards(bucket, ends)
        mine = shards[self.rank]
        if ends:
            return self._start("reduce-scatter", dist.reduce_scatter, mine, shards, op=op)
        return self._start("reduce-scatter", dist.reduce_scatter_tensor, mine, bucket, op=op)

    def all_gather(self, bucket: torch.Tensor, ends: Sequence[int] = ()) -> Pending:
        """Call `all_gather_into_tensor`, or `all_gather` where shards are unequal.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
        """
        shards = self._shards(bucket, ends)
        if ends:
            return self._start("all-gather", dist.all_gather, shards, shards[self.rank])
        return self._start("all-gather", dist.all_gather_into_tensor, bucket, shards[self.rank])

    def _shards(self, bucket: torch.Tensor, ends: Sequence[int]) -> list[torch.Tensor]:
        return [shard_of(bucket, rank, self.size, ends) for rank in range(self.size)]

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `all_reduce`.

        Args:
            bucket: a flat tensor.
            average: use the backend's AVG.
        """
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._start("all-reduce", dist.all_reduce, bucket, op=op)

    def _start(self, name: str, collective: Callable[..., Any], *tensors: Any, **options: Any) -> Pending:
        what = f"{name} of {_numel(tensors[0]):,} elements over {self.size} ranks"
        with needs_all_ranks(what):
            return Pending(what, [collective(*tensors, group=self.group, async_op=True, **options)])


@define(eq=False)
class Rooted(Native):
    """Shards of different lengths by one broadcast and one reduction each, for backends that want equal ones.

    Torch's fake process group is such a backend: it stands for many ranks where there is one.

    Args:
        group: the process group.
    """

    @override
    def reduce_scatter(
        self, bucket: torch.Tensor, ends: Sequence[int] = (), *, average: bool = False
    ) -> Pending:
        """Call `reduce` for each rank's shard where they are unequal.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
            average: use the backend's AVG.
        """
        if not ends:
            return super().reduce_scatter(bucket, average=average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        return self._of_each("reduce-scatter", dist.reduce, bucket, ends, "group_dst", op=op)

    @override
    def all_gather(self, bucket: torch.Tensor, ends: Sequence[int] = ()) -> Pending:
        """Call `broadcast` for each rank's shard where they are unequal.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
        """
        if not ends:
            return super().all_gather(bucket)
        return self._of_each("all-gather", dist.broadcast, bucket, ends, "group_src")

    def _of_each(
        self,
        name: str,
        collective: Callable[..., Any],
        bucket: torch.Tensor,
        ends: Sequence[int],
        root: str,
        **options: Any,
    ) -> Pending:
        what = f"{name} of {bucket.numel():,} elements over {self.size} ranks"
        with needs_all_ranks(what):
            works = [
                collective(shard, group=self.group, async_op=True, **{root: rank}, **options)
                for rank, shard in enumerate(self._shards(bucket, ends))
                if shard.numel()
            ]
        return Pending(what, works)


def _numel(given: torch.Tensor | Sequence[torch.Tensor]) -> int:
    return given.numel() if isinstance(given, torch.Tensor) else sum(tensor.numel() for tensor in given)


def communicator(group: ProcessGroup | None, device: torch.device) -> Communicator:
    """Return the collectives for a group.

    Args:
        group: the process group; None: this process alone.
        device: of the tensors; a group may have one backend a device.
    """
    if group is None or size_of(group) == 1:
        return Alone()
    backend = _backend(group, device)
    if "gloo" in backend:
        return PointToPoint(group)
    return Rooted(group) if backend in _EQUAL_SHARDS else Native(group)


def _backend(group: ProcessGroup, device: torch.device) -> str:
    name: str = dist.get_backend(group)
    for entry in dist.get_backend_config(group).split(","):
        kind, _, backend = entry.partition(":")
        if kind == device.type and backend:
            name = backend
    return name
