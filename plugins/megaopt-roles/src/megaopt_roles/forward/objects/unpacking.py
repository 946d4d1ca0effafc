"""The parts of a value that is assigned to several names."""

from __future__ import annotations

from typing import Any

import torch
from attrs import evolve
from torch import nn

from megaopt_roles.forward.objects.alternatives import Choice
from megaopt_roles.forward.objects.containers import items_of
from megaopt_roles.forward.rows import relabel
from megaopt_roles.forward.shapes.moves import of_sum
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight
from megaopt_roles.forward.weights.parts import taken

__all__ = ["unpack"]


def unpack(trace: Trace, value: Any, count: int, starred: int | None = None) -> list[Any]:
    """Return the parts of a value that is assigned to several names.

    Args:
        trace: where cuts are noted.
        value: what is unpacked.
        count: number of targets.
        starred: position of the starred target, if any.
    """
    if isinstance(value, torch.Size):
        value = list(value)
    if isinstance(value, nn.Module | Choice):
        value = items_of(trace, value)
    if isinstance(value, list | tuple):
        items = list(value)
        trace.count(items, count, starred)
        if starred is not None and len(items) >= count - 1:
            tail = count - 1 - starred
            stop = len(items) - tail
            return [*items[:starred], items[starred:stop], *items[stop:]]
        if len(items) in (1, count):  # one row of a weight stands for all
            return items if len(items) == count else items * count
        return [trace.unknown(value)] * count
    if isinstance(value, Flow):
        parts = _of_activation(trace, value, count, starred)
        return [evolve(part, zero=True) for part in parts] if value.zero else parts
    if isinstance(value, Weight) and value.shape and value.shape[0] == count and value.axes is not None:
        return [taken(value, 0, None) for _ in range(count)]
    return [trace.unknown(value)] * count


def _of_activation(trace: Trace, value: Flow, count: int, starred: int | None) -> list[Any]:
    """Return the parts of an activation, or of what a call returned."""
    if value.call is not None and value.tensor is None and starred is None:
        return [value.part(i) for i in range(count)]
    if value.terms:
        terms = [_of_activation(trace, term, count, starred) for term in value.terms]
        return [of_sum(value, list(parts)) for parts in zip(*terms, strict=True)]
    if value.fresh:
        return [value, *[Flow(value.deps)] * (count - 1)]  # a projection that returns its bias apart
    if value.tensor is not None and value.tensor.dim() and value.tensor.shape[0] == count:
        return [relabel(part, value) for part in value.tensor.unbind(0)]
    return [trace.unknown(value)] * count
