"""Parameter groups that are made in the middle of a run: they begin where the others are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["start_groups"]


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
