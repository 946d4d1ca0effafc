"""The strategies, and the live pieces of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from megaopt_core import Granularity, ParamSpec, ShardingStrategy
from megaopt_core.params import Shard
from megaopt_core.sharding import (
    LiveModel,
    Piece,
    ShardedParams,
    Travel,
    finish_grad_sync,
)
from megaopt_testing.strategies.exchanges import AllToAll
from megaopt_testing.strategies.layouts import OwnerLayout, RowLayout, travels

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from megaopt_core import ProcessGroupCollection

__all__ = ["Owners", "Rows", "SlicedParams"]

type _Gathering = tuple[Work | None, list[torch.Tensor], list[list[Shard]]]


@define(eq=False)
class SlicedParams(ShardedParams):
    """Pieces with memory of their own, whose values every rank gathers after a step.

    Args:
        pieces: this rank's.
        model: the live model.
        shards: what every rank has, in rank order.
        group: the ranks; None: this one alone.
        stats_group: norms add up over it.
        exchange: how updates of slices travel to owners; None: none do.
    """

    pieces: Sequence[Piece]
    model: LiveModel
    shards: Sequence[Sequence[Shard]]
    group: ProcessGroup | None
    stats_group: ProcessGroup | None
    exchange: AllToAll | None = None
    _gathered: list[_Gathering] = field(factory=list, init=False)

    def collect_grads(self) -> None:
        """Take the slices of gradients that whoever wraps the model has reduced."""
        finish_grad_sync(self.model.chunks)
        for piece in self.pieces:
            grad = self.model.grad(piece.spec.members[0][1])
            piece.grad = None if grad is None else grad.view(piece.param.shape)

    def take_model_values(self) -> None:
        """Take the slices of the model's present values."""
        for piece in self.pieces:
            self.model.fill(piece)

    def start_param_sync(self) -> None:
        """Gather the slices of all ranks, padded to the longest."""
        for dtype in dict.fromkeys(param.dtype for param in self.model.params.values()):
            of_rank = [
                [shard for shard in shards if self.model.params[shard.name].dtype == dtype]
                for shards in self.shards
            ]
            longest = max(sum(shard.numel for shard in shards) for shards in of_rank)
            if longest:
                mine = [piece.param.detach().view(-1) for piece in self.pieces if piece.param.dtype == dtype]
                self._gathered.append(self._gather(mine, dtype, longest, of_rank))

    def _gather(
        self, mine: list[torch.Tensor], dtype: torch.dtype, longest: int, of_rank: list[list[Shard]]
    ) -> _Gathering:
        like = next(iter(self.model.params.values()))
        flat = torch.cat([*mine, like.new_empty(0, dtype=dtype)])
        flat = torch.nn.functional.pad(flat, (0, longest - len(flat)))
        if self.group is None:
            return None, [flat], of_rank
        gathered = [torch.empty_like(flat) for _ in of_rank]
        return dist.all_gather(gathered, flat, group=self.group, async_op=True), gathered, of_rank

    def finish_param_sync(self) -> None:
        """Write the slices of all ranks into the model."""
        for work, gathered, of_rank in self._gathered:
            if work is not None:
                work.wait()
            for flat, shards in zip(gathered, of_rank, strict=True):
                lengths = [shard.numel for shard in shards]
                for shard, values in zip(
                    shards, flat[: sum(lengths)].split(lengths or 1), strict=bool(shards)
                ):
                    self.model.store(shard, values)
        self._gathered.clear()

    def travels(self) -> Mapping[str, Travel]:
        """Return the bytes of updates that this rank sends, there and back."""
        told: dict[str, Travel] = {}
        if self.exchange is None:
            return told
        rank, places = self.exchange.rank, self.exchange
        for piece, owner, counts in zip(self.pieces, places.owner_of, places.counts, strict=True):
            elements = sum(counts) - counts[rank] if owner == rank else counts[rank]
            name, width = piece.spec.members[0][1].name, max(4, piece.param.element_size())
            told[name] = Travel("split", elements * width)
        return told


def _refuse_divided(spec: ParamSpec) -> str | None:
    if spec.is_expert or spec.dividing:
        return "it is divided over model-parallel ranks, which this strategy of the kit does not look at"
    return None


def _attach(
    layout: RowLayout | OwnerLayout, model: LiveModel, pgs: ProcessGroupCollection, groups: Collection[int]
) -> SlicedParams:
    rank, group = model.rank.get("dp", 0), pgs.shard_group()
    ranks = [
        [piece for piece in layout.pieces({**model.rank, "dp": place}) if piece.group in groups]
        for place in range(layout.ranks)
    ]
    pieces = [model.new_piece(spec) for spec in ranks[rank]]
    shards = [[shard for piece in of_rank for _, shard in piece.members] for of_rank in ranks]
    return SlicedParams(pieces, model, shards, group, pgs.sharded_stats_group())


@frozen
class Rows(ShardingStrategy):
    """A slice of the rows of every parameter on every data-parallel rank; split steps travel to owners.

    Tensors that an optimizer only steps whole go to :class:`Owners`.
    """

    name: str = "kit_rows"
    granularities: frozenset[Granularity] = frozenset({Granularity.ELEMENT, Granularity.TENSOR})
    fallback: str | None = "kit_owners"

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot be cut by rows.

        Args:
            param: the parameter.
            spec: what it is.
        """
        if travels(spec) and not spec.splits:
            return f"{spec.optimizer!r} only steps whole tensors"
        return _refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: Any, options: Any) -> RowLayout:
        """Return who has which rows.

        Args:
            specs: the parameters.
            world: how many ranks there are.
            options: not looked at.
        """
        return RowLayout(tuple(specs), world.size("dp"))

    def attach(
        self,
        layout: Any,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Collection[int],
        *,
        is_expert: bool = False,
    ) -> SlicedParams:
        """Return this rank's rows, and how updates travel.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: the groups of one inner optimizer.
            is_expert: whether they hold experts.
        """
        params = _attach(layout, model, pgs, groups)
        rank = model.rank.get("dp", 0)
        specs = {spec.name: spec for spec in layout.specs if travels(spec)}
        moving = [specs[shard.name] for shard in params.shards[rank] if shard.name in specs]
        if moving and params.group is not None:
            owners = layout.owners()
            params.exchange = AllToAll(
                [model.infos[spec.name] for spec in moving],
                [owners[spec.name] for spec in moving],
                [[of_rank[index].numel for of_rank in params.shards] for index in range(len(moving))],
                params.group,
                rank,
            )
        return params


@frozen
class Owners(ShardingStrategy):
    """Whole parameters, dealt to the data-parallel ranks in turn; the owner steps and everybody gathers."""

    name: str = "kit_owners"
    granularities: frozenset[Granularity] = frozenset(Granularity)

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why a parameter cannot be owned by one rank.

        Args:
            param: the parameter.
            spec: what it is.
        """
        return _refuse_divided(spec)

    def layout(self, specs: Sequence[ParamSpec], world: Any, options: Any) -> OwnerLayout:
        """Return who owns what.

        Args:
            specs: the parameters.
            world: how many ranks there are.
            options: not looked at.
        """
        return OwnerLayout(tuple(specs), world.size("dp"))

    def attach(
        self,
        layout: Any,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Collection[int],
        *,
        is_expert: bool = False,
    ) -> SlicedParams:
        """Return what this rank owns.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: the groups of one inner optimizer.
            is_expert: whether they hold experts.
        """
        return _attach(layout, model, pgs, groups)
