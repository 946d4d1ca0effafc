"""Settings of groups, which users and schedulers write between steps: checked, copied inward, and back; of new ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.config._group_values import GroupChecks
from megaopt_core.errors import ConfigurationError, UnsupportedOperationError
from megaopt_core.params._parts import is_dtensor

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["GroupSettings", "common_defaults", "start_groups"]

_ABSENT = object()
_NOT_COPIED = ("params", "param_names")


@define(eq=False)
class GroupSettings:
    """The settings of an inner optimizer's groups, of which users have their own dictionaries.

    Args:
        inner: the torch optimizer.
        groups: the public groups, in the order of the inner ones.
        checks: key of a group to what may stand there.
    """

    inner: torch.optim.Optimizer
    groups: Sequence[dict[str, Any]]
    checks: GroupChecks
    _seen: dict[int, dict[str, Any]] = field(factory=dict, init=False)
    _member_ids: list[list[int]] = field(factory=list, init=False)
    _guarded: list[dict[str, Any]] | None = field(default=None, init=False)

    def know_members(self) -> None:
        """Take the parameters that the groups have for those that are stepped."""
        self._member_ids = [list(map(id, group["params"])) for group in self.groups]

    def guard_inner(self) -> None:
        """Refuse steps, from now on, before which somebody else wrote into the inner optimizer's groups."""
        self._guarded = [
            {key: value for key, value in group.items() if key not in _NOT_COPIED}
            for group in self.inner.param_groups
        ]

    def require_valid(self) -> None:
        """Raise for what somebody wrote into the groups and that cannot be; before anything changes.

        Raises:
            ConfigurationError: a value cannot be; the message names group, key, value and what is allowed.
            UnsupportedOperationError: a group has other parameters than it was given, or somebody wrote into the
                groups of an optimizer that is wrapped.
        """
        name = type(self.inner).__name__
        self._require_unwritten(name)
        if self._member_ids != [list(map(id, group["params"])) for group in self.groups]:
            if any(is_dtensor(param) for group in self.groups for param in group["params"]):
                raise UnsupportedOperationError(
                    f"the parameters of a group of {name} became DTensors: the model was sharded after its "
                    "optimizer was built, as accelerate and the Trainer of Hugging Face do. There, build "
                    "the optimizer by megaopt_fsdp.build_before_sharding(model, ...), which follows the "
                    "model; elsewhere, build it from the sharded model"
                )
            raise UnsupportedOperationError(
                f"the list of parameters in a group of {name} was changed by hand, and steps do not follow "
                "such a change. To stop the step of a parameter, freeze it (requires_grad_(False)); a "
                "parameter that is unfrozen or added to the model is stepped without a change of the list"
            )
        for index, group in enumerate(self.groups):
            seen = self._seen.setdefault(index, {})
            for key, check in self.checks.items():
                value = group.get(key, _ABSENT)
                if value is not seen.get(key, _ABSENT):
                    wrong = None if value is _ABSENT else check(value)
                    if wrong is not None:
                        where = f"param group {index} of {name}: "
                        raise ConfigurationError.of(key, value, wrong, where=where)
                    seen[key] = value

    def _require_unwritten(self, name: str) -> None:
        for group, seen in zip(self.inner.param_groups, self._guarded or (), strict=False):
            for key, value in seen.items():
                if group.get(key, value) is not value and _differ(group[key], value):
                    raise UnsupportedOperationError(
                        f"{key}={group[key]!r} was written into a group of the wrapped {name}, which steps "
                        "do not read: write into the param_groups of the wrapping optimizer, and give that "
                        "optimizer to schedulers"
                    )

    def copy_inward(self) -> None:
        """Give the inner optimizer the settings of the public groups."""
        for outer, inner in zip(self.groups, self.inner.param_groups, strict=True):
            if "momentum" in outer and "momentum" not in inner:
                _cycle_first_beta(outer)
            for key, value in outer.items():
                if key not in _NOT_COPIED:
                    inner[key] = value

    def copy_outward(self) -> None:
        """Take over what the inner optimizer has changed of its settings."""
        for outer, inner in zip(self.groups, self.inner.param_groups, strict=True):
            for key, value in inner.items():
                if key not in _NOT_COPIED and outer.get(key, _NOT_COPIED) is not value:
                    outer[key] = value
        if self._guarded is not None:
            self.guard_inner()


def _differ(one: Any, other: Any) -> bool:
    return isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or bool(one != other)


def _cycle_first_beta(group: dict[str, Any]) -> None:
    """Let what torch's schedulers set as `momentum` on every group of a mixed chain mean this group's first beta."""
    momentum = group.pop("momentum")
    if "betas" in group:
        group["betas"] = (momentum, *group["betas"][1:])


def common_defaults(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return the first optimizer's defaults that all have: what torch's schedulers may count on in every group.

    `momentum` is among them where one optimizer has it and the others have it or betas: set on a group with betas, it
    means the first of them.

    Args:
        optimizers: what is stepped as one.
    """
    if not optimizers:
        return {}
    every = [optimizer.defaults for optimizer in optimizers]
    common = {key: value for key, value in every[0].items() if all(key in other for other in every)}
    momenta = [defaults["momentum"] for defaults in every if "momentum" in defaults]
    if momenta and "betas" not in common:
        common.setdefault("momentum", momenta[0])
    return common


def start_groups(optimizer: MegatronOptimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Bring the learning rate of new groups to where a run is, before their first step.

    A scheduler of megaopt's sets it, with weight decay. Where somebody else writes learning rates, new groups get that
    part of their own that all others have of theirs; where these differ, the smallest.

    Args:
        optimizer: the optimizer that users hold.
        groups: the groups of it that are new.

    Raises:
        ScheduleError: the schedule of a plugin failed.
    """
    schedules = [schedule for reference in optimizer.schedules if (schedule := reference()) is not None]
    for schedule in schedules:
        schedule.apply_to(groups)
    new = set(map(id, groups))
    others = [_progress(group) for group in optimizer.param_groups if id(group) not in new]
    parts = [part for part in others if part is not None]
    if schedules or not parts:
        return
    for group in groups:
        if _progress(group) is not None and not isinstance(group["lr"], torch.Tensor):
            group["lr"] = group["lr"] * min(1.0, *parts)


def _progress(group: dict[str, Any]) -> float | None:
    """Return the part of its own learning rate that a group is stepped with; None where it has none of its own."""
    own = group.get("max_lr")
    return None if not own else float(group["lr"]) / own
