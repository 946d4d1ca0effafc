"""Who holds which part of what, who transforms it, and in which order updates travel: pure data."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence

from attrs import define, field

from megaopt_core import Granularity
from megaopt_core.errors import ShardingError
from megaopt_core.params import AxisPlacement, ParamSpec, RankCoordinates
from megaopt_core.sharding import Peers, PieceSpec, World
from megaopt_fsdp.blocks import blocks_of
from megaopt_fsdp.grid import Grid
from megaopt_fsdp.owners import Bucket, Owned, in_buckets, owned_by, travels

__all__ = ["FsdpLayout", "traffic"]

_SHARED_OUT = ("dp", "expert_dp")
"""The axes over which every layout shares parameters out."""


@define(eq=False)
class FsdpLayout:
    """Every rank steps the part that it holds; every block of whole matrices has an owner that transforms it.

    What cannot be stepped in parts is stepped by the owner of its block alone.

    Args:
        specs: the parameters of a pipeline stage, in model order.
        world: number of ranks along each axis.
    """

    specs: Sequence[ParamSpec]
    world: World
    _grids: dict[bool, Grid] = field(factory=dict, init=False)
    _model_grids: dict[bool, Grid] = field(factory=dict, init=False)
    _owned: dict[bool, Sequence[Owned]] = field(factory=dict, init=False)
    _blocks_of: dict[str, list[Owned]] = field(factory=dict, init=False)

    def spread_axes(self, *, is_expert: bool) -> tuple[str, ...]:
        """Return the axes along which ranks hold copies, and yet own different blocks.

        Args:
            is_expert: of expert parameters.
        """
        axes = self.grid(is_expert=is_expert).axes
        return tuple(axis for axis in axes if self.world.size(axis) > 1 and axis not in _SHARED_OUT)

    def warn_of_groups(self) -> None:
        """Warn of optimizers that must have all of a group on one rank, which steps alone."""
        counts: dict[str, int] = {}
        for spec in self.specs:
            if spec.granularity is Granularity.GROUP:
                counts[spec.optimizer] = counts.get(spec.optimizer, 0) + 1
        for name, count in counts.items():
            warnings.warn(
                f"{name!r} steps all of a group at once: under sharding='fsdp' one rank steps all {count} of its "
                "parameters whole, has their state, and all others wait for it",
                UserWarning,
                stacklevel=2,
            )

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
            if travels(spec) and not spec.splits:
                found += self._owned_pieces(spec, rank)
            elif _is_at(spec, rank) and (travels(spec) or spec.held_by(rank)):
                found.append(PieceSpec.of(spec.shard(rank), spec.group, peers=self._copies(spec, rank)))
        return found

    def _owned_pieces(self, spec: ParamSpec, rank: RankCoordinates) -> list[PieceSpec]:
        """Return the blocks of a parameter that a rank steps whole."""
        place = self.grid(is_expert=spec.is_expert).place(rank)
        self.owned(is_expert=spec.is_expert)
        blocks = self._blocks_of[spec.name]
        return [PieceSpec.of(spec.part(each.block.box), spec.group) for each in blocks if each.owner == place]

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

    def model_grid(self, *, is_expert: bool) -> Grid:
        """Return all ranks of the model, pipeline stages included.

        Args:
            is_expert: by the axes of expert parameters.
        """
        if is_expert not in self._model_grids:
            self._model_grids[is_expert] = Grid.of_model(self.world, is_expert=is_expert)
        return self._model_grids[is_expert]

    def owned(self, *, is_expert: bool) -> Sequence[Owned]:
        """Return all blocks with their owners, balanced by what they cost.

        Args:
            is_expert: of expert parameters.
        """
        if is_expert not in self._owned:
            grid = self.grid(is_expert=is_expert)
            specs = [spec for spec in self.specs if travels(spec) and spec.is_expert is is_expert]
            blocks = [block for spec in specs for block in blocks_of(spec, grid)]
            self._owned[is_expert] = owned_by(blocks, grid.size)
            self._blocks_of.update((spec.name, []) for spec in specs)
            for each in self._owned[is_expert]:
                self._blocks_of[each.block.spec.name].append(each)
        return self._owned[is_expert]

    def buckets(self, groups: Collection[int], *, is_expert: bool) -> Sequence[Bucket]:
        """Return what travels together, in order: in every bucket all owners have about as much to do.

        Args:
            groups: the routing's groups of one optimizer.
            is_expert: of expert parameters.
        """
        owned = self.owned(is_expert=is_expert)
        return in_buckets(each for each in owned if each.block.spec.group in groups)

    def digest(self, *, is_expert: bool) -> str:
        """Return what ranks compare of their plans: equal where owners, blocks and their order are.

        Args:
            is_expert: of expert parameters.
        """
        plan = [
            (each.block.spec.name, each.block.box, each.block.holders, each.owner, each.block.spec.splits)
            for each in self.owned(is_expert=is_expert)
        ]
        return hashlib.sha256(repr((sorted(self.world.axes.items()), plan)).encode()).hexdigest()

    def steps_whole(self, groups: Collection[int]) -> bool:
        """Return whether owners make the step of an optimizer alone.

        Args:
            groups: the routing's groups of one optimizer.
        """
        return any(travels(spec) and not spec.splits for spec in self.specs if spec.group in groups)


def _is_at(spec: ParamSpec, rank: RankCoordinates) -> bool:
    """Return whether a rank stands where a parameter is, if it has a part of it or not."""
    return all(each.index is None or each.index == rank.get(each.axis, 0) for each in spec.placements)


def _whose(placement: AxisPlacement) -> str:
    if placement.dim is None:
        return f"only the ranks at {placement.index} of {placement.axis!r} have it"
    return f"it is cut along dimension {placement.dim} over the {placement.size} ranks of {placement.axis!r}"


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
        for owned in bucket.owned:
            spec, owner = owned.block.spec, owned.owner
            for place in owned.block.senders(owner, grid):
                if place != owner:
                    sent[place] += spec.shard(grid.rank(place)).numel * bucket.there.itemsize
            for place in owned.block.holders:
                if place != owner:
                    sent[owner] += spec.shard(grid.rank(place)).numel * bucket.back.itemsize
    return sent
