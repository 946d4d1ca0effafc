"""How the parts of each block reach its owner and come back, as one rank sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from attrs import frozen

from megaopt_core.params import Box, RankCoordinates
from megaopt_core.sharding import Travel
from megaopt_fsdp.owners import Bucket, Owned
from megaopt_fsdp.stage import Stage

__all__ = ["Route", "Travelling", "routes_of", "told_of"]


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


@frozen
class Travelling:
    """One bucket as this rank sees it.

    Args:
        routes: what travels from, to or over this rank, in an order that all ranks share.
        there: dtype in which it goes to owners.
        back: dtype in which it comes back.
    """

    routes: Sequence[Route]
    there: torch.dtype
    back: torch.dtype


def routes_of(buckets: Sequence[Bucket], stage: Stage, rank: RankCoordinates) -> Sequence[Travelling]:
    """Return the buckets as this rank sees them, on every rank as many.

    Args:
        buckets: what travels together.
        stage: the ranks.
        rank: this rank's coordinates.
    """
    place = stage.grid.place(rank)
    return [
        Travelling(
            [_route(owned, stage, place) for owned in bucket.owned if place in owned.block.holders],
            bucket.there,
            bucket.back,
        )
        for bucket in buckets
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


def told_of(
    step: Literal["split", "whole"], buckets: Sequence[Travelling], stage: Stage
) -> Mapping[str, Travel]:
    """Return how each parameter travels, and how many bytes of it this rank sends in a step.

    Args:
        step: what owners do.
        buckets: what travels.
        stage: the ranks.
    """
    told = {}
    for bucket in buckets:
        for route in bucket.routes:
            others = sum(math.prod(box[1]) for rank, box in route.receivers if rank != stage.rank)
            mine = route.numel * (route.sends and route.owner != stage.rank)
            sent = mine * bucket.there.itemsize + others * bucket.back.itemsize
            told[route.name] = Travel(step, sent, stage.words(route.owner))
    return told
