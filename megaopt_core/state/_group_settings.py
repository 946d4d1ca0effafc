"""Group settings on loading: what the run changed is kept, what the user changed since then wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import warn_user
from megaopt_core.state._origin import configured

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = ["GroupMerge", "merge_groups"]

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
        kept: `"group 0: lr"` to `(configured, in the checkpoint)` where the configuration's value is kept.
        unclear: `"group 0: lr=0.1"`, as it stays, to the checkpoint's values, where it has several for one group.
    """

    changes: list[dict[str, Any]] = field(factory=list)
    kept: dict[str, tuple[Any, Any]] = field(factory=dict)
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
    groups: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> GroupMerge:
    """Decide about every setting of every group.

    A setting has three values: what was configured when it was saved, what it was by then (a schedule, the optimizer or
    the user may have changed it), and what is configured now. Where the configuration is what it was, the run goes on
    with the saved value; where it differs, somebody has changed it, and it wins. Where nobody knows what was
    configured, as in a state dict, the saved value holds.

    Args:
        optimizer: the optimizer that is loaded.
        group_of: parameter here to its group there, of those that the same optimizer steps; None: nobody knows.
        groups: of each group there its settings, and what was configured.
    """
    merge = GroupMerge()
    schedules = [schedule for each in optimizer.schedules if (schedule := each()) is not None]
    for index, (group, now) in enumerate(zip(optimizer.param_groups, configured(optimizer), strict=True)):
        here = [group_of.get(optimizer.names[param]) for param in group["params"]]
        positions = {position for position in here if position is not None}
        if not group["params"] and len(groups) == len(optimizer.param_groups):
            positions = {index}
        if not positions:
            merge.changes.append({})
            continue
        sources = [groups[position] for position in sorted(positions)]
        changes = _merge_one(merge, index, group, now, sources)
        for schedule in schedules:
            _follow(schedule, merge, index, group, sources[0][0], changes)
        merge.changes.append(changes)
    return merge


def _merge_one(
    merge: GroupMerge,
    index: int,
    group: Mapping[str, Any],
    now: Mapping[str, Any],
    sources: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> dict[str, Any]:
    changes = {}
    for key, saved in sources[0][0].items():
        others = [settings.get(key, _MISSING) for settings, _ in sources[1:]]
        if not all(equal(value, saved) for value in others):
            # Parameters of several groups are in one group now, and their values differ.
            shown = ", ".join("none" if value is _MISSING else repr(value) for value in (saved, *others))
            if key not in _TOLD_BY_OTHERS:
                merge.unclear[f"group {index}: {key}={group.get(key)!r}"] = shown
            continue
        was = sources[0][1].get(key, _MISSING)
        if key in now and was is not _MISSING and not equal(now[key], was):
            if not equal(now[key], saved):
                merge.kept[f"group {index}: {key}"] = (now[key], saved)
            continue
        if not equal(group.get(key, _MISSING), saved):
            changes[key] = saved
    return changes


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
        if equal(group.get(key), saved[key]):
            continue
        if not schedule.use_checkpoint_opt_param_scheduler:
            schedule.require_same(f"group {index}: {key}", group.get(key), saved[key])
        changes[key] = saved[key]
        merge.kept.pop(f"group {index}: {key}", None)


def equal(left: Any, right: Any) -> bool:
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
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    present = group.get(key)
    if isinstance(present, torch.Tensor) and key != "params":
        present.copy_(torch.as_tensor(value))  # a captured or compiled step holds on to this very tensor
    else:
        group[key] = value
