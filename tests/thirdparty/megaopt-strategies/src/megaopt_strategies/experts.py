"""Parameters that hold many experts are divided by expert; all others are dealt whole."""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import nn

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy
from megaopt_core.params import RankCoordinates
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
from megaopt_strategies.round_robin import held, refuse_divided


@frozen
class ExpertLayout:
    """Of `n` experts a rank has those from `n * rank // ranks` up to the next rank's first."""

    specs: Sequence[ParamSpec]
    world: World

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return a rank's experts and tensors."""
        found = []
        for turn, spec, shard in held(self.specs, rank):
            ranks, place = self.world.size(spec.data_axis), rank.get(spec.data_axis, 0)
            if spec.view is None or not spec.view.batch_dims:
                found += [PieceSpec.of(shard, spec.group)] if turn % ranks == place else []
                continue
            offsets, sizes = shard.box
            first, last = sizes[0] * place // ranks, sizes[0] * (place + 1) // ranks
            if first < last:
                box = (offsets[0] + first, *offsets[1:]), (last - first, *sizes[1:])
                found.append(PieceSpec.of(spec.part(box), spec.group))
        return found


@frozen
class ByExpert(ShardingStrategy):
    """Whole experts are whole matrices: optimizers of tensors step them as they are."""

    name: str = "by_expert"
    granularities: frozenset = frozenset({Granularity.ELEMENT, Granularity.TENSOR})

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take what is whole on every rank of the axis."""
        return refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ExpertLayout:
        """Divide."""
        return ExpertLayout(tuple(specs), world)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return views of the model's memory."""

        def live(spec):
            ((_, shard),) = spec.members
            return Piece(
                spec, torch.nn.Parameter(model.values(shard).view(spec.shape)), (model.params[shard.name],)
            )

        return attach(layout, model, pgs, groups, is_expert, live)
