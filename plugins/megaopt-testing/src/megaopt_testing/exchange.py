"""A sharding strategy for tests, in one process: every step that can be split goes through an exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field, frozen

from megaopt_core.params import Granularity, ParamInfo
from megaopt_core.sharding import LiveModel, Piece, Replicated, ReplicatedParams, Travel

__all__ = ["SelfExchange", "SelfExchangeStrategy", "SelfExchanged"]


@define(eq=False)
class SelfExchange:
    """Updates travel from this process to itself, two pieces a bucket, with empty buckets between.

    Args:
        infos: what each piece is.
    """

    infos: Sequence[ParamInfo]
    calls: list[tuple[str, int]] = field(factory=list, init=False)
    _under_way: dict[int, list[torch.Tensor | None]] = field(factory=dict, init=False)

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """Pairs of pieces, an empty bucket after each."""
        pairs = [
            tuple(range(first, min(first + 2, len(self.infos)))) for first in range(0, len(self.infos), 2)
        ]
        return [bucket for pair in pairs for bucket in (pair, ())]

    @property
    def owned(self) -> Sequence[ParamInfo]:
        """Everything."""
        return self.infos

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Copy updates, as a message would.

        Args:
            bucket: its position.
            updates: one a piece.
        """
        self.calls.append(("start_to_owners", bucket))
        self._under_way[bucket] = [None if update is None else update.clone() for update in updates]

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Return the copies, in the shapes of whole parameters.

        Args:
            bucket: its position.
        """
        self.calls.append(("finish_to_owners", bucket))
        arrived = zip(self.buckets[bucket], self._under_way[bucket], strict=True)
        return [
            (self.infos[index], update.view(self.infos[index].shape))
            for index, update in arrived
            if update is not None
        ]

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Copy transformed updates.

        Args:
            bucket: its position.
            transformed: one for each that has arrived.
        """
        self.calls.append(("start_back", bucket))
        found = iter(transformed)
        sent = self._under_way.pop(bucket)
        self._under_way[bucket] = [None if update is None else next(found).clone() for update in sent]

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return the copies.

        Args:
            bucket: its position.
        """
        self.calls.append(("finish_back", bucket))
        return self._under_way.pop(bucket)


@define
class SelfExchanged(ReplicatedParams):
    """The model's parameters, whose updates are exchanged.

    Args:
        exchange: how they travel.
    """

    exchange: SelfExchange | None = None

    def travels(self) -> Mapping[str, Travel]:
        """Return what is sent: every update once there and once back."""
        infos = self.exchange.infos if self.exchange is not None else ()
        return {
            info.name: Travel("split", 2 * piece.param.numel() * 4)
            for info, piece in zip(infos, self.pieces, strict=True)
        }


@frozen
class SelfExchangeStrategy(Replicated):
    """Replicated parameters whose updates travel; an optimizer that only steps whole is stepped as it is.

    Example:
        >>> from megaopt_core import build_optimizer, hookimpl
        >>> from megaopt_testing import temporary_plugin
        >>> class Plugin:
        ...     megaopt_api = "1"
        ...
        ...     @hookimpl
        ...     def megaopt_sharding_strategies(self):
        ...         return {"self_exchange": SelfExchangeStrategy(optimizers={"mine"})}
        >>> with temporary_plugin(Plugin()):
        ...     pass  # build_optimizer(model, "mine", sharding="self_exchange")

    Args:
        optimizers: names of the optimizers whose steps are split.
    """

    optimizers: frozenset[str] = field(default=frozenset(), converter=frozenset, kw_only=True)
    name: str = "self_exchange"
    granularities: frozenset[Granularity] = frozenset(Granularity)

    def attach(self, layout: Any, model: LiveModel, *args: Any, **kwargs: Any) -> ReplicatedParams:
        """Return the parameters with their exchange.

        Args:
            layout: what `layout` returned.
            model: the live model.
            *args: as of `replicated`.
            **kwargs: as of `replicated`.
        """
        replicated = super().attach(layout, model, *args, **kwargs)
        splits = {spec.name for spec in layout.specs if spec.optimizer in self.optimizers}
        infos = [model.infos[_name(piece)] for piece in replicated.pieces]
        if not infos or not splits >= {info.name for info in infos}:
            return replicated
        return SelfExchanged(
            replicated.pieces, replicated.stats_group, replicated.chunks, SelfExchange(infos)
        )


def _name(piece: Piece) -> str:
    return piece.spec.members[0][1].name
