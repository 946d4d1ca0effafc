"""Whole tensors, dealt to the ranks in turn."""

from collections import Counter
from collections.abc import Iterator, Sequence

from attrs import frozen
from torch import nn

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.params import RankCoordinates, Shard
from megaopt_core.sharding import (
    LayoutOptions,
    LiveModel,
    ParamLayout,
    Piece,
    PieceSpec,
    ShardedParams,
    World,
)
from megaopt_strategies.broadcast import attach


def held(specs: Sequence[ParamSpec], rank: RankCoordinates) -> Iterator[tuple[int, ParamSpec, Shard]]:
    """Yield `(place in the row, parameter, all that a rank holds of it)`, without those that are elsewhere."""
    turn = Counter()
    for spec in specs:
        if spec.held_by(rank):
            yield turn[spec.data_axis], spec, spec.shard(rank)
            turn[spec.data_axis] += 1


@frozen
class RoundRobinLayout:
    """The n-th parameter belongs to rank `n % ranks` of the axis that shares it out."""

    specs: Sequence[ParamSpec]
    world: World

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return the tensors of a rank."""
        return [
            PieceSpec.of(shard, spec.group)
            for turn, spec, shard in held(self.specs, rank)
            if turn % self.world.size(spec.data_axis) == rank.get(spec.data_axis, 0)
        ]


@frozen
class RoundRobin(ShardingStrategy):
    """An owner steps the model's own parameter, and sends it."""

    name: str = "round_robin"
    granularities: frozenset = frozenset({Granularity.ELEMENT, Granularity.TENSOR})

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take what is whole on every rank of the axis."""
        return refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> RoundRobinLayout:
        """Deal the parameters."""
        return RoundRobinLayout(tuple(specs), world)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return the parameters that this rank steps."""

        def live(spec):
            param = model.params[spec.members[0][1].name]
            return Piece(spec, param, (param,))

        return attach(layout, model, pgs, groups, is_expert, live)


def refuse_divided(spec: ParamSpec) -> str | None:
    """Return why a parameter cannot be shared out: it already is."""
    if any(placement.axis == spec.data_axis for placement in spec.dividing):
        return f"the ranks along {spec.data_axis!r} have divided it already"
    return None
