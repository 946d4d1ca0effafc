"""Blocks of rows in memory of their own, dealt like cards: a rank may have several of one parameter, or none."""

import math
from collections.abc import Iterator, Sequence

from attrs import frozen
from torch import nn

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.params import RankCoordinates
from megaopt_core.sharding import LayoutOptions, LiveModel, ParamLayout, PieceSpec, ShardedParams, World
from megaopt_strategies.broadcast import attach
from megaopt_strategies.round_robin import held, refuse_divided


def blocks(sizes: Sequence[int], ranks: int, alignment: int) -> Iterator[tuple[int, int]]:
    """Yield `(first, last)` rows of blocks, about two a rank, that end at multiples of so many elements."""
    rows, row = sizes[0], math.prod(sizes[1:])
    unit = alignment // math.gcd(alignment, row)
    length = unit * max(math.ceil(rows / unit / (2 * ranks)), 1)
    for first in range(0, rows, length):
        yield first, min(first + length, rows)


@frozen
class BlockLayout:
    """The n-th block of the k-th parameter belongs to rank `(k + n) % ranks`."""

    specs: Sequence[ParamSpec]
    world: World

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return the blocks of a rank."""
        found = []
        for turn, spec, shard in held(self.specs, rank):
            ranks, place = self.world.size(spec.data_axis), rank.get(spec.data_axis, 0)
            offsets, sizes = shard.box
            if not shard.numel or not sizes:
                found += [PieceSpec.of(shard, spec.group)] if turn % ranks == place else []
                continue
            for number, (first, last) in enumerate(blocks(sizes, ranks, spec.alignment)):
                if (turn + number) % ranks == place:
                    box = (offsets[0] + first, *offsets[1:]), (last - first, *sizes[1:])
                    found.append(PieceSpec.of(spec.part(box), spec.group))
        return found


@frozen
class RowBlocks(ShardingStrategy):
    """Every rank steps copies of its rows."""

    name: str = "row_blocks"
    granularities: frozenset = frozenset({Granularity.ELEMENT})
    fallback: str = "round_robin"

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take what is whole on every rank of the axis."""
        return refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> BlockLayout:
        """Cut and deal."""
        return BlockLayout(tuple(specs), world)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return this rank's blocks, in memory of their own."""
        return attach(layout, model, pgs, groups, is_expert, model.new_piece)
