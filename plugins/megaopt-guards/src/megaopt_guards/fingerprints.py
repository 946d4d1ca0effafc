"""Comparisons of replicas besides their values: stepped parameters, settings, schedules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megaopt_core import MegatronOptimizer, ProcessGroupCollection
from megaopt_core.optimizers import kind_of
from megaopt_core.parallel import Comparison, Rows, communicates
from megaopt_core.params import is_marked_expert
from megaopt_core.routing import plain_words, settings_alike
from megaopt_core.state import joins_of
from megaopt_guards.replicated_values import is_shared_out

__all__ = [
    "WRITTEN",
    "by_hand_alike",
    "is_of_experts",
    "schedules_alike",
    "settings_of_groups",
    "stepped_alike",
]

WRITTEN = frozenset(
    {"lr", "weight_decay", "max_lr", "min_lr", "wd_mult", "betas", "eps", "momentum", "clip_grad"}
)
"""Settings that people and schedulers write between steps; others an optimizer may write itself."""


def stepped_alike(optimizer: MegatronOptimizer, pgs: ProcessGroupCollection) -> list[Comparison]:
    """Return what ranks must have alike of what is stepped: which parameters, and which of them train.

    Args:
        optimizer: what this rank holds.
        pgs: the process groups.
    """
    found = []
    for group, is_expert in pgs.replicas:
        what = f"the parameters that are stepped{', of experts' * is_expert}"
        rows: Rows = [
            (f"parameter {name!r}", {"": "trains" if param.requires_grad else "was frozen after the build"})
            for param, name in optimizer.names.items()
            if is_of_experts(optimizer, param, name) is is_expert
        ]
        found.append(Comparison.of_rows(what, rows, group))
    return found


def is_of_experts(optimizer: MegatronOptimizer, param: torch.Tensor, name: str) -> bool:
    """Return whether a parameter is one of experts, which have replicas of their own.

    Args:
        optimizer: steps it.
        param: the parameter.
        name: its name.
    """
    entry = None if optimizer.routing is None else optimizer.routing.params.get(name)
    return is_marked_expert(param) if entry is None else entry.spec.is_expert


def settings_of_groups(
    optimizer: MegatronOptimizer,
    pgs: ProcessGroupCollection,
    groups: Iterable[Mapping[str, Any]] | None = None,
) -> list[Comparison]:
    """Return what is to be alike of the parameter groups: what was written into them too.

    Steps may note in a group what they did with the parameters of this rank, as the class says in `noted_by_steps`.
    Where ranks step other parameters each, their notes are their own.

    Args:
        optimizer: what this rank holds.
        pgs: the process groups.
        groups: settings that people and schedulers write, as they were before a step; None: all settings as they are.
    """
    group = pgs.dense_dp
    if not communicates(group):
        return []
    noted = {
        id(values): joins_of(part.inner)
        for part in optimizer.parts
        if is_shared_out(part, optimizer.process_groups)
        for values in part.groups
    }
    rows: Rows = [
        (
            f"param group {index}",
            {
                key: _plain(value)
                for key, value in sorted(values.items())
                if _is_setting(key, value) and key not in noted.get(id(values), ())
            },
        )
        for index, values in enumerate(optimizer.param_groups if groups is None else groups)
    ]
    return [Comparison.of_rows("the parameter groups", rows, group)]


def _is_setting(key: str, value: Any) -> bool:
    kinds = (str, bool, int, float, tuple, torch.Tensor, type(None))
    return key not in ("params", "param_names") and isinstance(value, kinds)


def _plain(value: Any) -> str:
    """Return a setting, or a tensor that holds one, in the same words on every rank, whatever kind of number it is."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
        value = int(value) if value.is_integer() and abs(value) < 1e15 else value
    return plain_words(value)


def schedules_alike(optimizer: MegatronOptimizer) -> list[Comparison]:
    """Return what all ranks must have alike of the schedulers that write into an optimizer's groups.

    Args:
        optimizer: what this rank holds.
    """
    alive = [schedule for schedule in (each() for each in optimizer.schedules) if schedule is not None]
    rows: Rows = [
        (
            f"scheduler {index}" if len(alive) > 1 else "the scheduler",
            {key: _plain(value) for key, value in schedule.state_dict().items()},
        )
        for index, schedule in enumerate(alive)
    ]
    return [Comparison.of_rows("the schedules", rows, None)]


def by_hand_alike(optimizer: MegatronOptimizer) -> list[Comparison]:
    """Return what is to be alike of optimizers that were wrapped by hand, besides values: no build has compared it.

    Args:
        optimizer: one that was wrapped, or a chain that may hold some.
    """
    several = len(optimizer.children) > 1
    found = []
    for index, each in enumerate(optimizer.children):
        chained = f"optimizer{index}" if several else ""
        found += [] if each.routing is not None else _wrapped_alike(each, chained)
    return found


def _wrapped_alike(wrapper: MegatronOptimizer, chained: str) -> list[Comparison]:
    """Return it of one; `chained` is its name in a chain, which its parameters have before their own."""
    prefix, suffix = (f"{chained}: ", f" of {chained}") if chained else ("", "")
    settings = settings_alike(wrapper.config)
    rows: Rows = [(f"{prefix}{name}", said) for name, said in settings.rows()]
    found = [Comparison.of_rows(f"{settings.what}{suffix}", rows, settings.group)]
    group = wrapper.process_groups.dense_dp
    if communicates(group):
        inner = type(wrapper.parts[0].inner).__name__
        rows = [
            (
                f"{prefix}parameter {name.removeprefix(f'{chained}.')!r}",
                {**kind_of(param), "optimizer": inner},
            )
            for param, name in wrapper.names.items()
        ]
        what = f"the parameters of {type(wrapper).__name__}{suffix}"
        found.append(Comparison.of_rows(what, rows, group))
    return found
