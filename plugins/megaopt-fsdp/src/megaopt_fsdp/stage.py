"""The process group of a grid: which of its ranks stands at which place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import astuple, frozen

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import ParallelGroupError, RankMismatchError
from megaopt_core.parallel import communicates, gather_objects, new_group
from megaopt_core.params import RankCoordinates
from megaopt_fsdp.grid import Grid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Stage"]


@frozen(eq=False)
class Stage:
    """The ranks of a grid.

    Args:
        grid: their places.
        group: their process group.
        place_of: rank in the group to place.
        rank_at: place to rank in the group.
    """

    grid: Grid
    group: ProcessGroup
    place_of: tuple[int, ...]
    rank_at: tuple[int, ...]

    @classmethod
    def of(cls, grid: Grid, rank: RankCoordinates, pgs: ProcessGroupCollection) -> Stage:
        """Return the group of a grid, made where there is none yet: a collective over each of its axes.

        Args:
            grid: the places.
            rank: this rank's coordinates.
            pgs: the process groups.

        Raises:
            ParallelGroupError: the groups of the axes do not span the grid.
        """
        known = {grid.place(rank): dist.get_rank()}
        for axis in grid.axes:
            group = pgs.of_axis(axis)
            if group is not None and communicates(group):
                for told in gather_objects(known, group, "finding the ranks that share tensors out"):
                    known.update(told)
            elif group is not None:
                known = _spread(known, grid, axis, dist.get_process_group_ranks(group))
        if len(known) != grid.size:
            sizes = dict(zip(grid.axes, grid.sizes, strict=True))
            raise ParallelGroupError(
                f"tensors are shared out over {sizes}, {grid.size} ranks, but the process groups of these axes lead to "
                f"{len(known)}; give the DeviceMesh of the whole model as pg_collection"
            )
        ranks = sorted(known.values())
        at = {ranks.index(known[place]): place for place in range(grid.size)}
        place_of = tuple(at[number] for number in range(grid.size))
        rank_at = tuple(place_of.index(place) for place in range(grid.size))
        return cls(grid, _group_of(ranks, pgs), place_of, rank_at)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self.group.rank()

    def sends_from(self, device: torch.device) -> bool:
        """Return whether the group has a backend for a kind of device.

        Args:
            device: where what is sent lies.
        """
        kinds: list[torch.device] = self.group._device_types
        return any(kind.type == device.type for kind in kinds)

    def require_same_plan(self, digest: str) -> None:
        """Raise on all ranks unless all have planned the same owners: a collective.

        Args:
            digest: of this rank's plan.

        Raises:
            RankMismatchError: ranks differ; the message names them.
        """
        if not communicates(self.group):
            return
        told = gather_objects(digest, self.group, "comparing the plans of owners")
        others = [f"rank {rank} ({self.words(rank)})" for rank, one in enumerate(told) if one != told[0]]
        if others:
            raise RankMismatchError(
                f"ranks have planned other owners than rank 0: {', '.join(others)}. Plans follow from the model, the "
                "settings and the versions of megaopt: all ranks need the same ones",
                differences=others,
            )

    def words(self, rank: int) -> str:
        """Return where a rank stands, in words.

        Args:
            rank: in the group.
        """
        at = self.grid.rank(self.place_of[rank])
        shown = [
            f"{axis} {at[axis]}"
            for axis, size in zip(self.grid.axes, self.grid.sizes, strict=True)
            if size > 1
        ]
        return ", ".join(shown)


def _spread(known: dict[int, int], grid: Grid, axis: str, ranks: Sequence[int]) -> dict[int, int]:
    """Return known places, and where one goes from them along an axis on which no rank answers: torch's fake group.

    Ranks stand in rows, as in every mesh that was not made by hand.
    """
    found = {}
    for place, rank in known.items():
        for coordinate, other in enumerate(ranks):
            found[grid.place({**grid.rank(place), axis: coordinate})] = rank + other - dist.get_rank()
    return found


def _group_of(ranks: Sequence[int], pgs: ProcessGroupCollection) -> ProcessGroup:
    """Return a group of just these ranks."""
    given: list[Any] = [dist.group.WORLD, *astuple(pgs, recurse=False)]
    like = None
    for group in given:
        if group is not None and group.size() > 1:
            like = like or group
            if sorted(dist.get_process_group_ranks(group)) == list(ranks):
                found: ProcessGroup = group
                return found
    if like is None:
        raise ParallelGroupError(f"no process group is given that holds the ranks {list(ranks)}")
    return new_group(ranks, like, "making the group of the ranks that share tensors out")
