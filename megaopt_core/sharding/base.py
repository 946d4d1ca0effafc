"""The protocol of sharding strategies: they say what a rank steps and move data; they never step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from attrs import define, field, frozen

from megaopt_core.params.specs import Granularity, ParamSpec
from megaopt_core.sharding.layout import (
    BufferKey,
    GradReduction,
    LayoutOptions,
    PerBufferParamLayout,
    PieceSpec,
    World,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.parallel.groups import ProcessGroupCollection

__all__ = [
    "LiveModel",
    "OverlappedParams",
    "ParamLayout",
    "Piece",
    "ShardedParams",
    "ShardingStrategy",
    "finish_grad_sync",
    "gradient_of",
]


def gradient_of(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that a step uses: `main_grad` where a buffer provides one, else `grad`.

    Args:
        param: the model parameter.
    """
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    return param.grad if main_grad is None else main_grad


def finish_grad_sync(chunks: Sequence[torch.nn.Module]) -> None:
    """Wait until the gradients of wrapped chunks are reduced; chunks that megaopt does not wrap are left alone.

    Args:
        chunks: the model chunks.
    """
    for chunk in chunks:
        finish = getattr(chunk, "finish_grad_sync", None)
        if finish is not None:
            finish()


class ParamLayout(Protocol):
    """A pure result, equal on every rank."""

    @property
    def buffers(self) -> Mapping[BufferKey, PerBufferParamLayout]:
        """The contiguous buffers that parameters lie in; empty when each keeps its own memory."""

    @property
    def reduction(self) -> Mapping[BufferKey, GradReduction]:
        """How each buffer's gradients are reduced."""

    def pieces(self, dp_rank: int, expert_dp_rank: int) -> Sequence[PieceSpec]:
        """Return what a rank steps.

        Args:
            dp_rank: rank in the data-parallel group.
            expert_dp_rank: rank in the expert data-parallel group.
        """


@define(eq=False)
class Piece:
    """One live tensor that this rank steps.

    Args:
        spec: the piece as pure data.
        param: the tensor, in the model's dtype: the parameter itself, or memory that holds its members' elements.
        model_params: the model parameters of `spec.members`, in that order.
        grad: the gradient that `collect_grads` found, of `param`'s shape; None when there is none this step.
    """

    spec: PieceSpec
    param: torch.Tensor
    model_params: tuple[torch.nn.Parameter, ...]
    grad: torch.Tensor | None = None


@frozen(eq=False)
class LiveModel:
    """The model as strategies see it.

    Args:
        chunks: the (possibly wrapped) model chunks.
        params: canonical name to parameter, every trainable one of this rank.
    """

    chunks: Sequence[torch.nn.Module]
    params: Mapping[str, torch.nn.Parameter]
    _shared: dict[int, tuple[object, Any]] = field(factory=dict, init=False)

    def shared[T](self, key: object, make: Callable[[], T]) -> T:
        """Return what a strategy keeps once for all optimizers of this model, made at the first call.

        Args:
            key: an object that tells it from others, such as the layout; compared by identity.
            make: makes it.
        """
        if id(key) not in self._shared:
            self._shared[id(key)] = key, make()
        value: T = self._shared[id(key)][1]
        return value


class ShardedParams(Protocol):
    """This rank's live pieces of one inner optimizer."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces, grouped as the layout ordered them."""

    @property
    def stats_group(self) -> ProcessGroup | None:
        """The group over which norms and counts of the pieces add up to those of whole parameters."""

    def collect_grads(self) -> None:
        """Set every piece's `grad` for this step; wait for reductions that are under way."""

    def start_param_sync(self) -> None:
        """Begin to bring the updated pieces to every rank that needs them."""

    def finish_param_sync(self) -> None:
        """Return when every model parameter is up to date on this rank, or when its forward pass will wait for it."""


@runtime_checkable
class OverlappedParams(ShardedParams, Protocol):
    """Pieces that can be brought to other ranks a unit at a time, while the next unit is stepped.

    A strategy whose `honours` names `overlap_param_gather_with_optimizer_step` attaches them.
    """

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """Positions of the pieces of each unit, in the order of stepping; as many units on every rank, some empty."""

    def start_unit_sync(self, unit: int) -> None:
        """Begin to bring a unit's updated pieces to every rank that needs them.

        Args:
            unit: its position in :attr:`units`; each is begun once a step, in that order.
        """


@runtime_checkable
class ShardingStrategy(Protocol):
    """Says which pieces of which named parameters a rank steps, and moves data before and after.

    A strategy never subclasses an optimizer, never builds one, and never learns which one it shards: it reads
    granularity, alignment and cost from the specs.

    A strategy that acts on core settings such as `overlap_param_gather` says so in an attribute `honours`, a set of
    field names; building fails when such a setting is on and no strategy in use honours it.
    """

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def granularities(self) -> frozenset[Granularity]:
        """Granularities that it can shard."""

    @property
    def companion(self) -> str | None:
        """The strategy that takes parameters whose granularity this one cannot."""

    def refuse(self, param: torch.nn.Parameter, spec: ParamSpec) -> str | None:
        """Return why this parameter cannot be sharded, None when it can.

        Args:
            param: the live parameter.
            spec: the same as pure data.
        """

    def layout(self, specs: Sequence[ParamSpec], world: World, options: LayoutOptions) -> ParamLayout:
        """Return who steps what: pure, the same on every rank.

        Args:
            specs: the parameters, in model order.
            world: sizes of the groups.
            options: what else the layout depends on.
        """

    def attach(
        self,
        layout: ParamLayout,
        model: LiveModel,
        pgs: ProcessGroupCollection,
        groups: Sequence[int],
        *,
        is_expert: bool = False,
    ) -> ShardedParams:
        """Return this rank's live pieces of the parameters in `groups`.

        Args:
            layout: what `layout` returned.
            model: the live model.
            pgs: the process groups.
            groups: indices of the routing's groups that one inner optimizer steps.
            is_expert: they hold expert parameters, which have process groups of their own.
        """
