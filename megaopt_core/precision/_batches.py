"""Stepping a part of an optimizer's tensors at a time, as if all had been stepped at once."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["in_turns"]


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
    settings = [_settings(group) for group in inner.param_groups]
    try:
        for number, batch in enumerate(batches):
            chosen = {id(tensor) for tensor in batch}
            for group, all_of_it, before in zip(inner.param_groups, members, settings, strict=True):
                group["params"] = [tensor for tensor in all_of_it if id(tensor) in chosen]
                if number:
                    _restore(group, before)
            yield batch
    finally:
        for group, all_of_it in zip(inner.param_groups, members, strict=True):
            group["params"] = all_of_it


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in group.items()
        if key != "params"
    }


def _restore(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    for key, value in before.items():
        if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = copy.copy(value)
