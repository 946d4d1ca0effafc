"""Collectives made of sends and receives, for backends whose own are slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.parallel import needs_all_ranks, rank_in, size_of
from megaopt_distributed.buffers.communicator import Pending, shard_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["CHUNK", "PointToPoint"]

CHUNK = 2**20
"""Elements that are sent as one message between two ranks."""


@define(eq=False)
class PointToPoint:
    """Every pair of ranks exchanges its shards directly, all at the same time, in chunks.

    Chunks of :data:`CHUNK` elements are added up while the next ones arrive and while they are in the cache.
    What is received lies in memory that is kept from one call to the next: fresh memory costs more than the transfer.

    Args:
        group: the process group; its backend has no AVG and slow collectives, but sends and receives in parallel.
    """

    group: ProcessGroup
    size: int = field(init=False)
    rank: int = field(init=False)
    _unused: list[torch.Tensor] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        self.size, self.rank = size_of(self.group), rank_in(self.group)

    @property
    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning behind itself, so that not all send to one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def reduce_scatter(
        self, bucket: torch.Tensor, ends: Sequence[int] = (), *, average: bool = False
    ) -> Pending:
        """Receive every rank's version of this rank's shard, and add them up.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
            average: divide by the number of ranks.
        """
        mine = shard_of(bucket, self.rank, self.size, ends)
        memory = self._borrow(mine.numel() * (self.size - 1), bucket)
        received = memory[: mine.numel() * (self.size - 1)].view(self.size - 1, mine.numel())
        arrivals, sends = [], []
        shards = [(peer, shard_of(bucket, peer, self.size, ends)) for peer in self._peers]
        what = self._what("reduce-scatter", bucket)
        with needs_all_ranks(what):
            for chunk in _chunks(max((mine.numel(), *(shard.numel() for _, shard in shards)))):
                if chunk.start < mine.numel():
                    rows = zip(self._peers, received, strict=True)
                    arrivals.append((chunk, [self._receive(peer, row[chunk]) for peer, row in rows]))
                sends += [
                    self._send(peer, shard[chunk]) for peer, shard in shards if chunk.start < shard.numel()
                ]

        def add_up() -> None:
            for chunk, receives in arrivals:
                for work in receives:
                    work.wait()
                for row in received:
                    mine[chunk].add_(row[chunk])
                if average:
                    mine[chunk].div_(self.size)

        return Pending(what, sends, add_up, lambda: self._unused.append(memory))

    def all_gather(self, bucket: torch.Tensor, ends: Sequence[int] = ()) -> Pending:
        """Send this rank's shard to every rank, and receive theirs.

        Args:
            bucket: a flat tensor.
            ends: where each rank's shard ends; empty: they are equal.
        """
        mine = shard_of(bucket, self.rank, self.size, ends)
        works = []
        shards = [(peer, shard_of(bucket, peer, self.size, ends)) for peer in self._peers]
        what = self._what("all-gather", bucket)
        with needs_all_ranks(what):
            for chunk in _chunks(max((mine.numel(), *(shard.numel() for _, shard in shards)))):
                works += [
                    self._receive(peer, shard[chunk]) for peer, shard in shards if chunk.start < shard.numel()
                ]
                if chunk.start < mine.numel():
                    works += [self._send(peer, mine[chunk]) for peer in self._peers]
        return Pending(what, works)

    def all_reduce(self, bucket: torch.Tensor, *, average: bool = False) -> Pending:
        """Call `all_reduce`, which gloo does well.

        Args:
            bucket: a flat tensor.
            average: divide by the number of ranks.
        """
        what = self._what("all-reduce", bucket)
        with needs_all_ranks(what):
            work = dist.all_reduce(bucket, group=self.group, async_op=True)

        def divide() -> None:
            bucket.div_(self.size)

        return Pending(what, [work], done=divide if average else None)

    def _receive(self, peer: int, tensor: torch.Tensor) -> Any:
        return dist.irecv(tensor, group=self.group, group_src=peer)

    def _send(self, peer: int, tensor: torch.Tensor) -> Any:
        return dist.isend(tensor, group=self.group, group_dst=peer)

    def _what(self, name: str, bucket: torch.Tensor) -> str:
        return f"{name} of {bucket.numel():,} elements over {self.size} ranks"

    def _borrow(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return memory for at least `numel` elements that nobody uses."""
        for index, memory in enumerate(self._unused):
            if memory.numel() >= numel and memory.dtype == like.dtype and memory.device == like.device:
                return self._unused.pop(index)
        return torch.empty(numel, dtype=like.dtype, device=like.device)


def _chunks(numel: int) -> Iterator[slice]:
    """Yield the ranges of a shard that are sent as one message each; ends are cut off where a shard is shorter."""
    for start in range(0, numel, CHUNK):
        yield slice(start, start + CHUNK)
