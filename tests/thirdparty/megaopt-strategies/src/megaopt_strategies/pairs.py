"""Two ranks step each tensor, so that either of them may be lost."""

from collections.abc import Sequence

from attrs import frozen
from torch import nn

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.params import RankCoordinates
from megaopt_core.sharding import (
    LayoutOptions,
    LiveModel,
    ParamLayout,
    Peers,
    PieceSpec,
    ShardedParams,
    World,
)
from megaopt_strategies.broadcast import attach
from megaopt_strategies.round_robin import held, refuse_divided


@frozen
class PairLayout:
    """The n-th parameter belongs to the n-th pair of ranks, in turn; an odd number of ranks has no pairs."""

    specs: Sequence[ParamSpec]
    world: World

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return the tensors of a rank; its peer has the same."""
        found = []
        for turn, spec, shard in held(self.specs, rank):
            axis, ranks = spec.data_axis, self.world.size(spec.data_axis)
            size = 1 if ranks % 2 else 2
            pair, index = divmod(rank.get(axis, 0), size)
            if turn % (ranks // size) == pair:
                found.append(PieceSpec.of(shard, spec.group, peers=Peers(axis, size, index)))
        return found


@frozen
class Pairs(ShardingStrategy):
    """Replicas: the first of each pair counts in norms, and sends."""

    name: str = "pairs"
    granularities: frozenset = frozenset({Granularity.ELEMENT, Granularity.TENSOR})

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take what is whole on every rank of the axis."""
        return refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> PairLayout:
        """Deal the parameters to pairs."""
        return PairLayout(tuple(specs), world)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return this rank's tensors, in memory of their own."""
        return attach(layout, model, pgs, groups, is_expert, model.new_piece)
