"""A sharding strategy for PyTorch's FSDP2, against the public protocol alone: each rank steps its local rows.

Not a product: it shows that a strategy whose parameters are DTensors needs nothing but the protocol.
"""

from collections.abc import Mapping, Sequence

import torch
from attrs import define, frozen
from torch import nn
from torch.distributed.tensor import DTensor

from megaopt_core import Granularity, ParamSpec, ProcessGroupCollection, ShardingStrategy, hookimpl
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

megaopt_api = "1"


@frozen(eq=False)
class RowLayout:
    """Rank `r` of `n` has rows `[r * ceil(rows / n), ...)` of every parameter, as `torch.chunk` cuts."""

    specs: Sequence[ParamSpec]

    def pieces(self, rank: RankCoordinates) -> list[PieceSpec]:
        """Return the rows of a rank, without parameters of which it has none."""
        shards = [(spec.shard(rank), spec.group) for spec in self.specs]
        return [PieceSpec.of(shard, group) for shard, group in shards if shard.numel]


@define(eq=False)
class LocalRows(ShardedParams):
    """Live pieces that are the local tensors of DTensors; FSDP2 reduces and gathers by itself."""

    pieces: Sequence[Piece]
    stats_group: object

    def collect_grads(self) -> None:
        """Take the local part of every gradient."""
        for piece in self.pieces:
            grad = piece.model_params[0].grad
            piece.grad = None if grad is None else grad.to_local()

    def take_model_values(self) -> None:
        """Nothing to do: pieces are the local tensors."""

    def start_param_sync(self) -> None:
        """Nothing to do: the forward pass gathers."""

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""


@frozen
class FSDP2(ShardingStrategy):
    """Steps the local shards of `fully_shard`ed parameters."""

    name: str = "fsdp2"
    granularities: frozenset[Granularity] = frozenset({Granularity.ELEMENT})

    def refuse(self, param: nn.Parameter, spec: ParamSpec) -> str | None:
        """Take parameters that are sharded by rows over one mesh dimension."""
        if not isinstance(param, DTensor):
            return "it is no DTensor; call fully_shard on the model first"
        if [placement.dim for placement in spec.dividing] != [0]:
            return f"it is divided by {spec.dividing}, not by one axis along dimension 0"
        return None

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> RowLayout:
        """Return who has which rows."""
        return RowLayout(tuple(specs))

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> LocalRows:
        """Return this rank's rows."""
        pieces = []
        for spec in layout.pieces(model.rank):
            if spec.group in groups:
                param = model.params[spec.members[0][1].name]
                pieces.append(Piece(spec, torch.nn.Parameter(param.detach().to_local()), (param,)))
        return LocalRows(pieces, pgs.sharded_stats_group())


@hookimpl
def megaopt_sharding_strategies() -> Mapping[str, ShardingStrategy]:
    """Return the strategy."""
    return {"fsdp2": FSDP2()}
