"""Stepping a part of an optimizer's tensors at a time, as if all had been stepped at once."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["group_settings", "in_turns", "keeping_other_settings"]


def in_turns(
    inner: torch.optim.Optimizer, batches: Sequence[Sequence[torch.Tensor]]
) -> Generator[Sequence[torch.Tensor]]:
    """Hand over once for each batch, while the groups of `inner` hold its tensors alone.

    Every batch begins with the group settings that the first began with: an optimizer that counts its steps in a group
    counts one. Afterwards the groups hold what they held before, and the settings that the last batch left.

    Args:
        inner: the optimizer.
        batches: the tensors of each turn; those that the groups do not hold now are left out.
    """
    members = [list(group["params"]) for group in inner.param_groups]
    settings = group_settings(inner)
    try:
        for number, batch in enumerate(batches):
            chosen = {id(tensor) for tensor in batch}
            for group, all_of_it in zip(inner.param_groups, members, strict=True):
                group["params"] = [tensor for tensor in all_of_it if id(tensor) in chosen]
            if number:
                for group, before in zip(inner.param_groups, settings, strict=True):
                    _restore(group, before)
            yield batch
    finally:
        for group, all_of_it in zip(inner.param_groups, members, strict=True):
            group["params"] = all_of_it


def group_settings(inner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return copies of the settings of every group.

    Args:
        inner: the optimizer.
    """
    return [_settings(group) for group in inner.param_groups]


@contextmanager
def keeping_other_settings(
    inner: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]
) -> Iterator[None]:
    """Let something begin with settings that groups had before, and keep those that it does not change as they are.

    Args:
        inner: the optimizer.
        settings: what :func:`group_settings` returned.
    """
    now = group_settings(inner)
    for group, before in zip(inner.param_groups, settings, strict=True):
        _restore(group, before)
    try:
        yield
    finally:
        for group, before, present in zip(inner.param_groups, settings, now, strict=True):
            _restore(group, {key: present[key] for key in present if _equal(group.get(key), before.get(key))})


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in group.items()
        if key != "params"
    }


def _equal(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _restore(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key, value in before.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = copy.copy(value)
