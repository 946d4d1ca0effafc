"""Values that may be one of several: what branches left, modules of which it is not known which."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from megaopt_roles.forward.dependencies import is_mark, of_all
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.values import Flow, Weight, deps_of, held_by, terms_of, together
from megaopt_roles.forward.weights.forms import any_of, whole_weight

__all__ = ["Choice", "abstract", "merge_values", "one_of"]


def abstract(value: Any) -> Any:
    """Return a value in the form that the evaluator computes with."""
    if isinstance(value, nn.Parameter):
        return Flow() if torch.nn.parameter.is_lazy(value) else whole_weight(value)
    if isinstance(value, torch.Tensor):
        return Flow(tensor=torch.empty(tuple(value.shape), device="meta"))
    return value


@frozen(eq=False)
class Choice:
    """One of several modules; which one is not known."""

    modules: tuple[nn.Module, ...]

    def items(self) -> list[Any] | None:
        """Return what a loop over it sees; None where one of them is no list of modules."""
        lists: list[list[Any]] = []
        for module in self.modules:
            held = None if isinstance(module, nn.ModuleDict) else quiet.items(module)
            if held is None:
                return None
            lists.append(held)
        return [one_of([held[i] for held in lists if i < len(held)]) for i in range(max(map(len, lists)))]


def one_of(values: Sequence[Any]) -> Any:
    """Return what stands for one of several values; which one is not known.

    Args:
        values: at least one.
    """
    there: list[Any] = []
    for value in values:
        if value is not None:
            there.extend(value.modules if isinstance(value, Choice) else [abstract(value)])
    if there and all(isinstance(value, nn.Module) for value in there):
        return Choice(tuple(there))
    if there and all(isinstance(value, Weight) for value in there):
        return any_of(there)
    return functools.reduce(merge_values, there, None)


def merge_values(first: Any, second: Any) -> Any:
    """Return a value that may be either of two: what two branches left in one variable."""
    if first is second or second is None:
        return first
    if first is None:
        return second
    if isinstance(first, Flow) and isinstance(second, Flow):
        return _either(first, second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        if len(first) == len(second):
            return [merge_values(one, other) for one, other in zip(first, second, strict=True)]
        return first if len(first) > len(second) else second
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: merge_values(first.get(key), second.get(key)) for key in {**first, **second}}
    for one, other in ((first, second), (second, first)):
        if isinstance(one, Weight):  # followed on, as if the other value had gone into it
            either = any_of((one, other)) if isinstance(other, Weight) else one
            return evolve(either, deps=one.deps | deps_of(other))
        if isinstance(one, Flow):
            return other if _says_more(other, one) else _with_items(one, other)
    return first if isinstance(first, nn.Module) or _equal(first, second) else Flow()


def _either(first: Flow, second: Flow) -> Flow:
    """Return an activation that may be either of two; of different rows of one shape it goes on with both."""
    deps, terms = of_all((first.deps, second.deps)), terms_of(first, second)
    if len({id(term.piece) for term in terms}) > 1:
        return together(deps, terms)
    keep = first if first.piece is not None or second.tensor is None else second
    return Flow(deps, keep.tensor, keep.piece)


def _with_items(flow: Flow, other: Any) -> Flow:
    """Return an activation that may as well be a list: of several outputs, say, while the model trains."""
    deps = deps_of(other) if isinstance(other, list | tuple) else frozenset()
    if deps <= flow.deps:
        return flow
    return evolve(flow, deps=flow.deps | deps, call=None, held=(*held_by(flow), *held_by(other)))


def _says_more(value: Any, flow: Flow) -> bool:
    given = isinstance(value, dict) and all(map(is_mark, flow.deps))
    return isinstance(value, nn.Module) or given or (isinstance(value, list | tuple) and not flow.deps)


def _equal(first: Any, second: Any) -> bool:
    return quiet.is_plain(first) and quiet.is_plain(second) and bool(first == second)
