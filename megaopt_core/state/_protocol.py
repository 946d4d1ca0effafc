"""What state needs of an optimizer: named pieces, groups, and what steps them. Optimizers lie in a higher layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from megaopt_core.execution._inner_part import InnerPart

if TYPE_CHECKING:
    from megaopt_core.config._group_values import GroupChecks
    from megaopt_core.plugin_api._observers import Change
    from megaopt_core.routing._routing import Routing
    from megaopt_core.sharding._protocol import ShardedParams

__all__ = ["NamedPieces", "StatefulOptimizer"]


class NamedPieces(InnerPart, Protocol):
    """The pieces that one inner optimizer steps; each names the parameters whose elements it holds."""

    @property
    def sharded(self) -> ShardedParams:
        """Who brings the model's values to the pieces."""

    @property
    def groups(self) -> Sequence[dict[str, Any]]:
        """The public groups, one for each of the inner optimizer's."""

    @property
    def scalar_states(self) -> frozenset[str]:
        """State keys that are one number for a parameter."""

    @property
    def changes(self) -> Any:
        """What its last step has changed: `has_step` says whether there was one."""


class StatefulOptimizer(Protocol):
    """An optimizer, single or chained, as far as its state goes; every `MegatronOptimizer` is one."""

    @property
    def parts(self) -> Sequence[NamedPieces]:
        """What is stepped."""

    @property
    def names(self) -> Mapping[torch.nn.Parameter, str]:
        """Model parameter to canonical name."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The public groups of all parts."""

    @property
    def group_checks(self) -> Sequence[GroupChecks]:
        """For every public group, what its values may be."""

    @property
    def routing(self) -> Routing | None:
        """Which optimizer steps what, and why; None for one that was wrapped by hand."""

    state: Any
    """Live state by model parameter."""

    watched_model: Any
    """The model that it was built for, whose chunks have names."""

    late: Any
    """Takes in parameters after the build; None for one that was wrapped or chained by hand."""

    step_lock: Any
    """Keeps steps and saves apart: `with step_lock.saving():`."""

    @property
    def schedules(self) -> Sequence[Callable[[], Any]]:
        """References to the schedulers that set its groups."""

    bounds_before_load: list[dict[str, Any]] | None
    """The schedule's settings of the groups before a load, when no scheduler was there."""

    def changing(self, what: Change) -> AbstractContextManager[None]:
        """Take over what somebody wrote to the model before the block; take its values for ours after it."""

    grad_scaler: Any
    """The loss scaler, which has a state dict; None where nothing scales."""
