"""All ranks step each tensor together, a part each: for optimizers whose ranks talk to each other."""

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


@frozen
class PartLayout:
    """Rows, as equal as they can be, none where there are fewer than ranks; a scalar is stepped by each of them."""

    specs: Sequence[ParamSpec]
    world: World

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return a rank's part of every tensor."""
        found = []
        for spec in (spec for spec in self.specs if spec.held_by(rank)):
            axis, ranks = spec.data_axis, self.world.size(spec.data_axis)
            place = rank.get(axis, 0)
            if not spec.shape:
                found.append(PieceSpec.of(spec.shard(rank), spec.group, peers=Peers(axis, ranks, place)))
                continue
            rows = spec.shape[0]
            first, last = rows * place // ranks, rows * (place + 1) // ranks
            box = (first, *[0] * (len(spec.shape) - 1)), (last - first, *spec.shape[1:])
            found.append(PieceSpec.of(spec.part(box), spec.group, peers=Peers(axis, ranks, place, dim=0)))
        return found


@frozen
class Parts(ShardingStrategy):
    """Takes what an optimizer lets several ranks step."""

    name: str = "parts"
    granularities: frozenset = frozenset({Granularity.TENSOR})

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take whole tensors of optimizers that have peers."""
        if not spec.takes_peers:
            return f"{spec.optimizer!r} has no peers (supports_peers)"
        return f"it is divided already: {spec.dividing}" if spec.dividing else None

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> PartLayout:
        """Cut every tensor."""
        return PartLayout(tuple(specs), world)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return this rank's parts, in memory of their own."""
        return attach(layout, model, pgs, groups, is_expert, model.new_piece)
