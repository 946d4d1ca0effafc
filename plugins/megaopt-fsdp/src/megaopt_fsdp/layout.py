"""Who holds which part of what, who transforms it, and in which order updates travel: pure data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from attrs import define, field, frozen
from megaopt_layerwise.planner import plan_owners

from megaopt_core import Granularity
from megaopt_core.errors import ShardingError
from megaopt_core.params import AxisPlacement, ParamSpec, RankCoordinates
from megaopt_core.sharding import Peers, PieceSpec, World
from megaopt_fsdp.blocks import Block, blocks_of
from megaopt_fsdp.grid import Grid

__all__ = ["Bucket", "FsdpLayout", "Owned", "traffic", "travels"]

BUCKET_BYTES = 2**25
"""Bytes of updates that one owner gets in one bucket, where a matrix has no more."""


def travels(spec: ParamSpec) -> bool:
    """Return whether an optimizer must see a parameter whole.

    Args:
        spec: the parameter.
    """
    return spec.granularity is not Granularity.ELEMENT


@frozen
class Owned:
    """A block with its owner.

    Args:
        block: what is transformed.
        owner: place of the rank that does it.
    """

    block: Block
    owner: int


@frozen
class Bucket:
    """What travels together.

    Args:
        dtype: in which.
        owned: blocks with their owners, in an order that all ranks share.
    """

    dtype: torch.dtype
    owned: Sequence[Owned]


@define(eq=False)
class FsdpLayout:
    """Every rank steps the part that it holds; every block of whole matrices has an owner that transforms it.

    Args:
        specs: the parameters of a pipeline stage, in model order.
        world: number of ranks along each axis.
    """

    specs: Sequence[ParamSpec]
    world: World
    _grids: dict[bool, Grid] = field(factory=dict, init=False)
    _owned: dict[bool, Sequence[Owned]] = field(factory=dict, init=False)

    def require_known_axes(self) -> None:
        """Raise unless all axes that cut parameters are places of ranks that updates can travel between.

        Raises:
            ShardingError: one is not; the message names parameter and axis.
        """
        for spec in self.specs:
            known = self.grid(is_expert=spec.is_expert).axes
            for placement in spec.dividing:
                if placement.axis not in known:
                    raise ShardingError(
                        f"sharding='fsdp' cannot take {spec.name!r}: {_whose(placement)}. pg_collection says which "
                        "ranks are which: give the DeviceMesh that the model was sharded with, its dimensions named "
                        "'dp', 'dp_replicate', 'tp', 'ep'...; parameters of experts carry allreduce=False, or lie "
                        "on 'ep'"
                    )

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what a rank holds; of parameters whose updates travel also where that is nothing.

        Args:
            rank: its coordinates.
        """
        found = []
        for spec in self.specs:
            is_here = all(
                each.index is None or each.index == rank.get(each.axis, 0) for each in spec.placements
            )
            if is_here and (travels(spec) or spec.held_by(rank)):
                found.append(PieceSpec.of(spec.shard(rank), spec.group, peers=self._copies(spec, rank)))
        return found

    def _copies(self, spec: ParamSpec, rank: RankCoordinates) -> Peers | None:
        """Return the ranks that step the same elements, where data parallelism has not cut a parameter."""
        axis, size = spec.data_axis, self.world.size(spec.data_axis)
        if size == 1 or any(placement.axis == axis for placement in spec.dividing):
            return None
        return Peers(axis, size, rank.get(axis, 0))

    def grid(self, *, is_expert: bool) -> Grid:
        """Return the ranks among which parameters travel.

        Args:
            is_expert: of expert parameters.
        """
        if is_expert not in self._grids:
            self._grids[is_expert] = Grid.of(self.world, is_expert=is_expert)
        return self._grids[is_expert]

    def owned(self, *, is_expert: bool) -> Sequence[Owned]:
        """Return all blocks with their owners, balanced by what they cost.

        Args:
            is_expert: of expert parameters.
        """
        if is_expert not in self._owned:
            grid = self.grid(is_expert=is_expert)
            specs = [spec for spec in self.specs if travels(spec) and spec.is_expert is is_expert]
            blocks = [block for spec in specs for block in blocks_of(spec, grid)]
            plan = plan_owners([block.work for block in blocks], grid.size)
            self._owned[is_expert] = [Owned(block, plan.owners[block.name].ranks[0]) for block in blocks]
        return self._owned[is_expert]

    def buckets(self, groups: Collection[int], *, is_expert: bool) -> Sequence[Bucket]:
        """Return what travels together, in order: in every bucket all owners have about as much to do.

        Args:
            groups: the routing's groups of one optimizer.
            is_expert: of expert parameters.
        """
        by_dtype: dict[torch.dtype, list[Owned]] = {}
        for owned in self.owned(is_expert=is_expert):
            if owned.block.spec.group in groups:
                dtype = torch.promote_types(owned.block.spec.dtype, torch.float32)
                by_dtype.setdefault(dtype, []).append(owned)
        return [Bucket(dtype, some) for dtype, mine in by_dtype.items() for some in _in_buckets(mine, dtype)]


def _whose(placement: AxisPlacement) -> str:
    if placement.dim is None:
        return f"only the ranks at {placement.index} of {placement.axis!r} have it"
    return f"it is cut along dimension {placement.dim} over the {placement.size} ranks of {placement.axis!r}"


def _in_buckets(owned: Sequence[Owned], dtype: torch.dtype) -> list[list[Owned]]:
    """Share what owners have out over buckets, each owner's dearest first, by its own work done before."""
    by_owner: dict[int, list[Owned]] = {}
    for each in owned:
        by_owner.setdefault(each.owner, []).append(each)
    needed = [min(len(mine), -(-_bytes(mine, dtype) // BUCKET_BYTES)) for mine in by_owner.values()]
    buckets: list[list[Owned]] = [[] for _ in range(max(needed, default=0))]
    for mine in by_owner.values():
        mine.sort(key=lambda each: (-each.block.work.cost, each.block.name))
        costs = [max(each.block.work.cost, 1.0) for each in mine]
        total, done = sum(costs), 0.0
        for each, cost in zip(mine, costs, strict=True):
            buckets[int(len(buckets) * (done + cost / 2) / total)].append(each)
            done += cost
    return [bucket for bucket in buckets if bucket]


def _bytes(owned: Sequence[Owned], dtype: torch.dtype) -> int:
    return sum(each.block.work.numel for each in owned) * dtype.itemsize


def traffic(layout: FsdpLayout, groups: Collection[int], *, is_expert: bool) -> Mapping[int, int]:
    """Return how many bytes each place sends to others in a step, there and back.

    Args:
        layout: who owns what.
        groups: the routing's groups.
        is_expert: of expert parameters.
    """
    grid = layout.grid(is_expert=is_expert)
    sent = dict.fromkeys(range(grid.size), 0)
    for bucket in layout.buckets(groups, is_expert=is_expert):
        width = bucket.dtype.itemsize
        for owned in bucket.owned:
            spec, owner = owned.block.spec, owned.owner
            for place in owned.block.senders(owner, grid):
                if place != owner:
                    sent[place] += spec.shard(grid.rank(place)).numel * width
            for place in owned.block.holders:
                if place != owner:
                    sent[owner] += spec.shard(grid.rank(place)).numel * width
    return sent
