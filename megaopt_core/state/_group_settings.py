"""Group settings on loading: those that were saved, as far as schedulers and other groups let them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import warn_user

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = ["GroupMerge", "equal_settings", "merge_groups"]

_MISSING = object()
_BOUNDS = ("max_lr", "min_lr", "start_wd", "end_wd", "wd_mult")
"""Settings of a schedule that groups have of their own: they follow the rule of the scheduler."""
_SCHEDULED = (*_BOUNDS, "lr", "weight_decay")
_TOLD_BY_OTHERS = ("default_config", "is_decoupled_lr", "is_expert_parallel")
"""What says how other settings came about."""


@define
class GroupMerge:
    """The settings that a load writes.

    Args:
        changes: per public group the settings to write.
        unclear: `"group 0: lr=0.1"`, as it stays, to the checkpoint's values, where it has several for one group.
    """

    changes: list[dict[str, Any]] = field(factory=list)
    unclear: dict[str, str] = field(factory=dict)

    def warn(self) -> None:
        """Name the settings of which the checkpoint has several values for one group."""
        if self.unclear:
            shown = "; ".join(f"{where} stays ({values})" for where, values in self.unclear.items())
            warn_user(
                "parameters that were in several groups are in one group here, and settings of those groups differ: "
                f"{shown}",
                UserWarning,
            )

    def write(self, optimizer: StatefulOptimizer, undo: list[Callable[[], None]]) -> None:
        """Write the settings into the public groups.

        Args:
            optimizer: whose groups.
            undo: receives what takes back whatever has been written.
        """
        before = [
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
            for group in optimizer.param_groups
        ]

        def take_back() -> None:
            for group, values in zip(optimizer.param_groups, before, strict=True):
                for key in [key for key in group if key not in values]:
                    del group[key]
                for key, value in values.items():
                    _set(group, key, value)

        undo.append(take_back)
        if not optimizer.schedules:  # one that is made after the load may want its own
            optimizer.bounds_before_load = [
                {key: group.get(key) for key in _BOUNDS} for group in optimizer.param_groups
            ]
        for group, changes in zip(optimizer.param_groups, self.changes, strict=True):
            for key, value in changes.items():
                _set(group, key, value)


def merge_groups(
    optimizer: StatefulOptimizer,
    group_of: Mapping[str, int | None],
    groups: Sequence[Mapping[str, Any]],
    stays: Callable[[int, int, str], bool] = lambda *_: False,
) -> GroupMerge:
    """Decide about every setting of every group.

    Args:
        optimizer: the optimizer that is loaded.
        group_of: parameter here to its group there, of those that the same optimizer steps; None: nobody knows.
        groups: of each group there its settings.
        stays: whether the value here stays of a setting, given the positions of the groups here and there, and its key.
    """
    merge = GroupMerge()
    schedules = [schedule for each in optimizer.schedules if (schedule := each()) is not None]
    for index, group in enumerate(optimizer.param_groups):
        here = [group_of.get(optimizer.names[param]) for param in group["params"]]
        positions = sorted({position for position in here if position is not None})
        if not group["params"] and len(groups) == len(optimizer.param_groups):
            positions = [index]
        if not positions:
            merge.changes.append({})
            continue
        sources = [groups[position] for position in positions]
        changes = {
            key: saved
            for key, saved in _common(merge, index, group, sources).items()
            if not stays(index, positions[0], key) and not equal_settings(group.get(key, _MISSING), saved)
        }
        for schedule in schedules:
            _follow(schedule, merge, index, group, sources[0], changes)
        merge.changes.append(changes)
    return merge


def _common(
    merge: GroupMerge, index: int, group: Mapping[str, Any], sources: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the settings that are equal in all groups there whose parameters are in one group now."""
    common = {}
    for key, saved in sources[0].items():
        others = [settings.get(key, _MISSING) for settings in sources[1:]]
        if all(equal_settings(value, saved) for value in others):
            common[key] = saved
        elif key not in _TOLD_BY_OTHERS:
            shown = ", ".join("none" if value is _MISSING else repr(value) for value in (saved, *others))
            merge.unclear[f"group {index}: {key}={group.get(key)!r}"] = shown
    return common


def _follow(
    schedule: Any,
    merge: GroupMerge,
    index: int,
    group: Mapping[str, Any],
    saved: Mapping[str, Any],
    changes: dict[str, Any],
) -> None:
    """Let what a scheduler reads of a group follow the scheduler's rule, whatever is configured."""
    if schedule.override_opt_param_scheduler:
        for key in _SCHEDULED:
            changes.pop(key, None)
        return
    unclear = {where.partition("=")[0] for where in merge.unclear}
    for key in (key for key in _BOUNDS if key in saved and f"group {index}: {key}" not in unclear):
        if equal_settings(group.get(key), saved[key]):
            continue
        if not schedule.use_checkpoint_opt_param_scheduler:
            schedule.require_same(f"group {index}: {key}", group.get(key), saved[key])
        changes[key] = saved[key]


def equal_settings(left: Any, right: Any) -> bool:
    """Return whether two settings are equal; tensors by value, lists and tuples alike.

    Args:
        left: one.
        right: the other.
    """
    if left is _MISSING or right is _MISSING:
        return left is right
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        one, other = torch.as_tensor(left), torch.as_tensor(right)
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(equal_settings, left, right))
    return bool(left == right)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor) and key != "params":
        present.copy_(torch.as_tensor(value))  # a captured or compiled step holds on to this very tensor
    else:
        group[key] = value
