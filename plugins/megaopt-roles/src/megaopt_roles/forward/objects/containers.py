"""What loops, and `**`, see of containers."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import nn

from megaopt_roles.forward.objects.alternatives import Choice, abstract
from megaopt_roles.forward.objects.attributes import Bound
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, is_abstract
from megaopt_roles.forward.weights.parts import taken

__all__ = ["MOST_ITEMS", "entries", "items_of", "rows_gone_through"]

MOST_ITEMS = 64
"""Rounds of a loop that are read: as many as models have layers."""


def entries(value: Any) -> dict[Any, Any] | None:
    """Return what `**value` spreads, in the form that the evaluator computes with; None where that is not known."""
    if isinstance(value, nn.ModuleDict):
        return {name: child for name, child in value._modules.items() if child is not None}
    if isinstance(value, nn.ParameterDict):
        return {name: abstract(param) for name, param in value._parameters.items()}
    return value if isinstance(value, dict) else None


def rows_gone_through(value: Any) -> int:
    """Return how many rows a weight has that a loop goes through one by one; 0 for more, and for anything else."""
    rows = value.shape[0] if isinstance(value, Weight) and value.shape else 0
    return rows if rows <= MOST_ITEMS else 0


def items_of(trace: Trace, value: Any) -> list[Any]:
    """Return what a loop over a value sees; of long plain sequences the two ends."""
    if isinstance(value, Weight):  # its rows
        row = taken(value, 0, None) if value.shape and value.axes else value
        return [row] * (rows_gone_through(value) or 1)
    if isinstance(value, Flow):
        coded = value.one_hot and value.coded
        return [evolve(trace.unknown(value), one_hot=value.one_hot, coded=coded, zero=value.zero)] * 2
    if is_abstract(value) or value is None or isinstance(value, Bound):
        return [trace.unknown(value)] * 2
    if isinstance(value, Choice):
        items = value.items()
        return [trace.unknown(value)] * 2 if items is None else items
    items = quiet.items(value)
    if items is None:
        return [trace.unknown(value)] * 2 if isinstance(value, nn.Module) else [Flow()]
    if isinstance(value, nn.Module | str):
        return [abstract(item) for item in items]
    plain = len(items) > MOST_ITEMS and not any(
        isinstance(item, nn.Module | Weight | tuple) for item in items
    )
    return [*items[:3], *items[-2:]] if plain else items
