"""How the parts of each block reach its owner and come back, as one rank sees it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from attrs import frozen

from megaopt_core.params import Box, RankCoordinates
from megaopt_fsdp.layout import FsdpLayout, Owned
from megaopt_fsdp.stage import Stage

__all__ = ["Route", "routes_of"]


@frozen
class Route:
    """One block that this rank owns or holds a part of.

    Args:
        name: of the parameter.
        box: the block, inside the parameter.
        owner: rank of its owner, in the group of the stage.
        numel: elements that this rank holds.
        sends: this rank's part is one of those that make up the block; others have the same elements.
        senders: of the owner alone: ranks whose parts make up the block, ascending, each with its part.
        receivers: of the owner alone: all ranks that hold a part, ascending, each with its part.
    """

    name: str
    box: Box
    owner: int
    numel: int
    sends: bool
    senders: tuple[tuple[int, Box], ...] = ()
    receivers: tuple[tuple[int, Box], ...] = ()

    def window(self, whole: torch.Tensor, part: Box) -> torch.Tensor:
        """Return a part of the block, as a view.

        Args:
            whole: the block.
            part: offsets and sizes inside the parameter.
        """
        view = whole.view(self.box[1])
        for dim, (offset, size) in enumerate(zip(*part, strict=True)):
            view = view.narrow(dim, offset - self.box[0][dim] if size else 0, size)
        return view


def routes_of(
    layout: FsdpLayout, stage: Stage, rank: RankCoordinates, groups: Collection[int], *, is_expert: bool
) -> Sequence[Sequence[Route]]:
    """Return what travels from, to and over this rank: in every bucket, in an order that all ranks share.

    Args:
        layout: who owns what.
        stage: the ranks.
        rank: this rank's coordinates.
        groups: the routing's groups of one optimizer.
        is_expert: they hold expert parameters.
    """
    place = stage.grid.place(rank)
    return [
        [_route(owned, stage, place) for owned in bucket.owned if place in owned.block.holders]
        for bucket in layout.buckets(groups, is_expert=is_expert)
    ]


def _route(owned: Owned, stage: Stage, place: int) -> Route:
    block, spec, grid = owned.block, owned.block.spec, stage.grid
    senders = block.senders(owned.owner, grid)
    is_mine = owned.owner == place

    def parts(places: Sequence[int]) -> tuple[tuple[int, Box], ...]:
        found = ((stage.rank_at[at], spec.box(grid.rank(at))) for at in places)
        return tuple(sorted(found, key=lambda each: each[0]))

    return Route(
        name=spec.name,
        box=block.box,
        owner=stage.rank_at[owned.owner],
        numel=spec.shard(grid.rank(place)).numel,
        sends=place in senders,
        senders=parts(senders) if is_mine else (),
        receivers=parts(block.holders) if is_mine else (),
    )
