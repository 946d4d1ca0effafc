"""How updates of slices travel to the owners of whole tensors and back: one all-to-all a bucket and direction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.params import ParamInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["AllToAll"]


@define
class _Arriving:
    work: Work
    received: torch.Tensor
    sent: torch.Tensor
    lengths: list[list[int]]


@define(eq=False)
class AllToAll:
    """Updates to their owners and back, two parameters a bucket.

    Args:
        infos: what the piece at each position is.
        owner_of: which rank transforms it.
        counts: how many of its elements each rank has.
        group: the ranks.
        rank: this one's place among them.
    """

    infos: Sequence[ParamInfo]
    owner_of: Sequence[int]
    counts: Sequence[Sequence[int]]
    group: ProcessGroup
    rank: int
    _given: dict[int, dict[int, torch.Tensor | None]] = field(factory=dict, init=False)
    _arriving: dict[int, _Arriving] = field(factory=dict, init=False)

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Positions, two and two."""
        return [
            tuple(range(first, min(first + 2, len(self.infos)))) for first in range(0, len(self.infos), 2)
        ]

    @property
    def owned(self) -> Sequence[ParamInfo]:
        """What this rank transforms."""
        return [info for info, owner in zip(self.infos, self.owner_of, strict=True) if owner == self.rank]

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Send each slice to the owner of its tensor.

        Args:
            bucket: its position.
            updates: one a piece; None where there is no gradient, on every rank.
        """
        given = self._given[bucket] = dict(zip(self.buckets[bucket], updates, strict=True))
        of_owner = self._by_owner(bucket)
        leaving = [[given[index].view(-1) for index in indices] for indices in of_owner]  # type: ignore[union-attr] # only those that move
        arriving = [[self.counts[i][rank] for i in of_owner[self.rank]] for rank in range(len(of_owner))]
        self._start(bucket, leaving, arriving)

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Put the slices of each tensor together.

        Args:
            bucket: its position.
        """
        mine, of_rank = self._by_owner(bucket)[self.rank], self._finish(bucket)
        wholes = [torch.cat(slices) for slices in zip(*of_rank, strict=True)]
        return [
            (self.infos[i], whole.view(self.infos[i].shape)) for i, whole in zip(mine, wholes, strict=True)
        ]

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Send each rank its slices of every tensor that this one owns.

        Args:
            bucket: its position.
            transformed: one for each that has arrived.
        """
        of_owner = self._by_owner(bucket)
        mine = zip(of_owner[self.rank], transformed, strict=True)
        cut = [whole.reshape(-1).split(list(self.counts[index])) for index, whole in mine]
        leaving = [[slices[rank] for slices in cut] for rank in range(len(of_owner))]
        arriving = [[self.counts[index][self.rank] for index in indices] for indices in of_owner]
        self._start(bucket, leaving, arriving)

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return this rank's slices of every tensor that has an update.

        Args:
            bucket: its position.
        """
        of_owner, arrived = self._by_owner(bucket), self._finish(bucket)
        slices = dict(zip(chain(*of_owner), chain(*arrived), strict=True))
        given = self._given.pop(bucket)
        return [None if update is None else slices[i].view(update.shape) for i, update in given.items()]

    def _by_owner(self, bucket: int) -> list[list[int]]:
        """Return the positions of what travels, by the rank that owns it."""
        moving = [index for index, update in self._given[bucket].items() if update is not None]
        return [[i for i in moving if self.owner_of[i] == rank] for rank in range(self.group.size())]

    def _start(
        self, bucket: int, leaving: Iterable[Iterable[torch.Tensor]], arriving: list[list[int]]
    ) -> None:
        """Begin to send tensors to each rank; `arriving` are the lengths of those that come from each."""
        like = next((update for update in self._given[bucket].values() if update is not None), None)
        if like is None:
            return  # so it is on every rank
        sent = [list(tensors) for tensors in leaving]
        flat = torch.cat([like.new_empty(0), *chain(*sent)])
        received = flat.new_empty(sum(map(sum, arriving)))
        sizes = [sum(lengths) for lengths in arriving], [sum(map(len, tensors)) for tensors in sent]
        work = dist.all_to_all_single(received, flat, *sizes, group=self.group, async_op=True)
        assert work is not None  # this rank belongs to the group
        self._arriving[bucket] = _Arriving(work, received, flat, arriving)

    def _finish(self, bucket: int) -> list[list[torch.Tensor]]:
        """Return what has come from each rank."""
        if bucket not in self._arriving:
            return [[] for _ in range(self.group.size())]
        arriving = self._arriving.pop(bucket)
        arriving.work.wait()
        parts = iter(arriving.received.split([*chain(*arriving.lengths)]))
        return [[next(parts) for _ in lengths] for lengths in arriving.lengths]
