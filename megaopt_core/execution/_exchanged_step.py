"""The step in three parts: updates travel to their owners and back, bucket by bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

from megaopt_core.errors import PluginError, ShardingError
from megaopt_core.execution._inner import global_hooks_suspended, run_inner
from megaopt_core.execution._placeholders import (
    StatePlaceholder,
    hidden_in,
    placeholders_hidden,
    put_placeholders,
)
from megaopt_core.params._specs import ParamInfo
from megaopt_core.precision._batches import group_settings, keeping_other_settings
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.sharding._live_model import Piece
from megaopt_core.sharding._protocol import ShardedParams
from megaopt_core.sharding._split_step import Exchange, SplitStep, StatefulSplitStep

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import OptimizerEntry

__all__ = ["ExchangedStep", "exchanged_step"]


@frozen
class _Sent:
    """A bucket on its way.

    Args:
        params: its tensors that have a gradient.
        memory: what they were lent until they have been stepped.
        sends: for each piece, whether an update was sent.
    """

    params: list[torch.Tensor]
    memory: ExitStack
    sends: list[bool]


@define(eq=False)
class ExchangedStep:
    """Drives a split step over an exchange: bucket k + 1 travels while bucket k is transformed.

    Updates of two buckets are in memory at most, and with a precision policy that lends memory, their tensors.

    Args:
        split: the step in three parts.
        exchange: how updates travel.
        inner: the inner optimizer.
        precision: lends memory, and writes back what was stepped.
        pieces: this rank's pieces.
        stepped: the tensor that is stepped for each.

    Raises:
        ShardingError: a piece is in no bucket or in two, or this rank owns a tensor of which it holds no piece.
    """

    split: SplitStep
    exchange: Exchange
    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    pieces: Sequence[Piece]
    stepped: Sequence[torch.Tensor]
    _position: dict[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        times = Counter(index for bucket in self.exchange.buckets for index in bucket)
        wrong = [index for index in range(len(self.pieces)) if times.pop(index, 0) != 1] or list(times)
        if wrong:
            raise ShardingError(
                f"the buckets of an exchange must hold each of the {len(self.pieces)} pieces once; the "
                f"positions {wrong[:5]} are in no bucket, in two buckets, or do not exist"
            )
        self._position = {
            shard.name: index for index, piece in enumerate(self.pieces) for _, shard in piece.spec.members
        }
        strangers = [info.name for info in self.exchange.owned if info.name not in self._position]
        if strangers:
            raise ShardingError(
                f"this rank owns {', '.join(strangers[:5])}, but holds no piece of it: give the rank a piece "
                "without elements"
            )

    @property
    def transform_keys(self) -> frozenset[str]:
        """State keys that belong to whole tensors and their owners."""
        return self.split.transform_keys if isinstance(self.split, StatefulSplitStep) else frozenset()

    @property
    def transform_state(self) -> MutableMapping[str, dict[str, Any]]:
        """What owners keep, by parameter name; live."""
        return self.split.transform_state if isinstance(self.split, StatefulSplitStep) else {}

    def logical_shape(self, info: ParamInfo) -> tuple[int, ...]:
        """Return the shape of the parameter of which some is transformed here.

        Args:
            info: one of the exchange's `owned`.
        """
        ((_, shard), *_) = self.pieces[self._position[info.name]].spec.members
        return shard.shape

    def stand_in(self, info: ParamInfo) -> torch.Tensor:
        """Return a tensor of the shape, dtype and device that an owned update has, with no memory of its own.

        Args:
            info: one of the exchange's `owned`.
        """
        position = self._position[info.name]
        # Updates travel, and are transformed, where the model is, wherever a piece of it is stepped.
        device = self.pieces[position].model_params[0].device
        return torch.empty((), dtype=self.stepped[position].dtype, device=device).expand(info.shape)

    def init_state(self) -> None:
        """Put placeholders where the first step will make state: of slices, and of whole tensors with their owners."""

        def make() -> None:
            self.split.init_state([param for group in self.inner.param_groups for param in group["params"]])

        run_inner(self.precision, self.inner, make)
        put_placeholders(self.inner)
        if isinstance(self.split, StatefulSplitStep):
            owned = list(self.exchange.owned)
            self.split.init_transform_state([self.stand_in(info) for info in owned], owned)
            states = self.split.transform_state
            states.update({name: StatePlaceholder(state) for name, state in states.items()})

    def step(self) -> None:
        """Step every piece that has a gradient."""
        settings = group_settings(self.inner)
        count = len(self.exchange.buckets)
        states = self.transform_state
        with (
            global_hooks_suspended(),
            placeholders_hidden(self.inner),
            hidden_in(states, list(states)),
            ExitStack() as lent,
        ):
            on_the_way: list[_Sent] = []
            for bucket in range(count):
                on_the_way.append(self._send(bucket, settings, lent.enter_context(ExitStack())))
                if bucket:
                    self._finish(bucket - 1, on_the_way.pop(0))
            if count:
                self._finish(count - 1, on_the_way.pop())

    def _send(self, bucket: int, settings: Sequence[Mapping[str, Any]], memory: ExitStack) -> _Sent:
        """Compute the updates of a bucket and begin to send them.

        As in a step of several batches, every bucket begins with the settings that the first began with: an optimizer
        that counts its steps counts one. What the other parts have set meanwhile stays.
        """
        indices = self.exchange.buckets[bucket]
        memory.enter_context(self.precision.lent(indices, self.inner))
        tensors = [self.stepped[index] for index in indices]
        sends = [tensor.grad is not None for tensor in tensors]
        params = [tensor for tensor, has_grad in zip(tensors, sends, strict=True) if has_grad]
        with keeping_other_settings(self.inner, settings):
            updates = self.split.local_updates(params)
        self._require_shapes("local_updates", updates, [param.shape for param in params])
        found = (_wide(update) for update in updates)
        self.exchange.start_to_owners(bucket, [next(found) if has_grad else None for has_grad in sends])
        return _Sent(params, memory, sends)

    def _finish(self, bucket: int, sent: _Sent) -> None:
        """Transform what this rank owns of a bucket, and apply what comes back to its pieces."""
        self.exchange.start_back(bucket, self._transformed(self.exchange.finish_to_owners(bucket)))
        back = self.exchange.finish_back(bucket)
        if [update is not None for update in back] != sent.sends:
            raise ShardingError(
                f"{type(self.exchange).__name__}.finish_back({bucket}) must return an update for every piece that sent "
                "one, and for no other"
            )
        self.split.apply(sent.params, [update for update in back if update is not None])
        sent.memory.close()
        self.precision.write_back(self.exchange.buckets[bucket])

    def _transformed(self, arrived: Sequence[tuple[ParamInfo, torch.Tensor]]) -> list[torch.Tensor]:
        if not arrived:
            return []
        infos = [info for info, _ in arrived]
        updates = [update.to(self.stepped[self._position[info.name]].dtype) for info, update in arrived]
        transformed = self.split.transform(updates, infos)
        self._require_shapes("transform", transformed, [torch.Size(info.shape) for info in infos])
        return [_wide(update) for update in transformed]

    def _require_shapes(
        self, part: str, tensors: Sequence[torch.Tensor], shapes: Sequence[torch.Size]
    ) -> None:
        found = [tensor.shape for tensor in tensors]
        if found != list(shapes):
            raise PluginError(
                f"{type(self.split).__name__}.{part} returned tensors of the shapes {list(map(tuple, found))}; "
                f"it must return {list(map(tuple, shapes))}"
            )


def _wide(update: torch.Tensor) -> torch.Tensor:
    """Return an update as it travels: float32 or wider, contiguous."""
    return update.to(torch.promote_types(update.dtype, torch.float32)).contiguous()


def exchanged_step(
    entry: OptimizerEntry,
    name: str,
    config: OptimizerConfig,
    inner: torch.optim.Optimizer,
    precision: PrecisionPolicy,
    sharded: ShardedParams,
    stepped: Sequence[torch.Tensor],
) -> ExchangedStep | None:
    """Return what drives the step of pieces that have an exchange, None for those that have none.

    Args:
        entry: the optimizer's entry.
        name: its registered name, for errors.
        config: the run's configuration.
        inner: the inner optimizer, which has no state yet.
        precision: the precision policy, attached.
        sharded: this rank's pieces.
        stepped: the tensor that is stepped for each.

    Raises:
        ShardingError: the optimizer's step cannot be split.
    """
    if sharded.exchange is None:
        return None
    refusal, make = entry.split_refusal(config), entry.load_split_step()
    if refusal is not None or make is None:
        raise ShardingError(
            f"the sharding strategy exchanges updates of {name!r}, which only steps whole tensors: {refusal}"
        )
    return ExchangedStep(make(inner), sharded.exchange, inner, precision, sharded.pieces, stepped)
