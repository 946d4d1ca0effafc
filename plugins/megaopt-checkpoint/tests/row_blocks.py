"""A sharding strategy whose pieces are row blocks with memory of their own: sub-boxes of what the model holds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from attrs import define, frozen
from megaopt_testing import temporary_plugin

from megaopt_core import ProcessGroupCollection, hookimpl
from megaopt_core.optimizers._building import builder
from megaopt_core.params import Granularity, ParamSpec, RankCoordinates, Shard
from megaopt_core.routing import _sharding as layouts
from megaopt_core.sharding import (
    LayoutOptions,
    LiveModel,
    ParamLayout,
    PieceSpec,
    ShardedParams,
    ShardingStrategy,
    World,
)


@frozen
class BlockLayout:
    specs: tuple
    ranks: int

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        found, dp_rank = [], rank.get("dp", 0)
        for spec in self.specs:
            rows = spec.shape[0]
            first, last = rows * dp_rank // self.ranks, rows * (dp_rank + 1) // self.ranks
            sizes = (last - first, *spec.shape[1:])
            box = ((first, *[0] * (len(spec.shape) - 1)), sizes)
            shard = Shard(spec.name, spec.shape, box, 0, torch.Size(sizes).numel())
            if shard.numel:
                found.append(PieceSpec(spec.group, sizes, ((0, shard),)))
        return found


@define
class BlockParams(ShardedParams):
    pieces: list
    model: LiveModel
    stats_group = None

    def collect_grads(self) -> None:
        for piece in self.pieces:
            (param,) = piece.model_params
            piece.grad = _rows(param.grad, piece.spec)

    def take_model_values(self) -> None:
        for piece in self.pieces:
            self.model.fill(piece)

    def start_param_sync(self) -> None:
        for piece in self.pieces:
            (param,) = piece.model_params
            _rows(param.data, piece.spec).copy_(piece.param.detach())

    def finish_param_sync(self) -> None:
        pass


def _rows(tensor: torch.Tensor, spec: PieceSpec) -> torch.Tensor:
    ((_, shard),) = spec.members
    first = shard.box[0][0]
    return tensor[first : first + shard.box[1][0]]


@frozen
class RowBlocks(ShardingStrategy):
    """Args: ranks, and which of them this process is."""

    ranks: int
    rank: int
    name = "blocks"
    granularities = frozenset({Granularity.ELEMENT})
    fallback = "replicated"

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> BlockLayout:
        return BlockLayout(tuple(specs), self.ranks)

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> BlockParams:
        pieces = [model.new_piece(spec) for spec in layout.pieces({"dp": self.rank}) if spec.group in groups]
        return BlockParams(pieces, model)


class BlockPlugin:
    """The strategy `blocks`."""

    megaopt_api = "1"

    def __init__(self, ranks: int, rank: int) -> None:
        self.strategy = RowBlocks(ranks, rank)

    @hookimpl
    def megaopt_sharding_strategies(self) -> dict[str, ShardingStrategy]:
        return {"blocks": self.strategy}


@contextmanager
def row_blocks(ranks: int, rank: int) -> Iterator[None]:
    """Register the strategy for the time of a `with` block; this process stands for one rank of several."""
    with (
        mock.patch.object(layouts, "owners_of"),
        mock.patch.object(builder, "require_attached"),
        temporary_plugin(BlockPlugin(ranks, rank), name="row-blocks"),
    ):
        yield
