"""Attributes and items of the objects that forward sources handle: modules, configurations, containers."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import nn

from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.module_classes import forward_of, home_of
from megaopt_roles.forward.sources.stored_weights import made_of
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, held_by, is_abstract
from megaopt_roles.forward.weights.forms import any_of, whole_weight
from megaopt_roles.forward.weights.parts import taken

__all__ = [
    "MOST_ITEMS",
    "Bound",
    "Choice",
    "Property",
    "abstract",
    "attribute_of",
    "entries",
    "items_of",
    "merge_values",
    "one_of",
]

MOST_ITEMS = 64
"""Rounds of a loop that are read: as many as models have layers."""


@frozen(eq=False)
class Bound:
    """A method of a module, or of another object.

    Args:
        owner: what it is called on.
        function: the plain function; None for a method that is known by its name only.
        name: of the method.
        args: positional arguments that its class has given already, by a `partialmethod`.
        kwargs: keyword arguments that it has given.
    """

    owner: Any
    function: Callable[..., Any] | None
    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class Property:
    """A property whose getter is still to be read."""

    owner: Any
    function: Callable[..., Any]


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


def entries(value: Any) -> dict[Any, Any] | None:
    """Return what `**value` spreads, in the form that the evaluator computes with; None where that is not known."""
    if isinstance(value, nn.ModuleDict):
        return {name: child for name, child in value._modules.items() if child is not None}
    if isinstance(value, nn.ParameterDict):
        return {name: abstract(param) for name, param in value._parameters.items()}
    return value if isinstance(value, dict) else None


def abstract(value: Any) -> Any:
    """Return a value in the form that the evaluator computes with."""
    if isinstance(value, nn.Parameter):
        return Flow() if torch.nn.parameter.is_lazy(value) else whole_weight(value)
    if isinstance(value, torch.Tensor):
        return Flow(tensor=torch.empty(tuple(value.shape), device="meta"))
    return value


def attribute_of(owner: Any, name: str) -> Any:
    """Return an attribute of a concrete object, without running any code of the user's."""
    if isinstance(owner, nn.Module):
        return _module_attribute(owner, name)
    if isinstance(owner, Choice):
        found = [_module_attribute(module, name) for module in owner.modules]
        alike = all(isinstance(item, nn.Module) for item in found)
        return one_of(found) if alike or any(isinstance(item, Weight) for item in found) else found[0]
    if type(owner) is list and name in ("values", "indices") and len(owner) == 2:  # of topk and sort
        return owner[name == "indices"]
    if type(owner) in (list, dict, tuple, str, set, torch.Size) and hasattr(owner, name):
        return Bound(owner, None, name)
    if isinstance(owner, type):
        return _of_class(owner, name)
    if isinstance(owner, types.ModuleType) or home_of(type(owner)).partition(".")[0] == "torch":
        try:
            return abstract(getattr(owner, name))
        except (AttributeError, RuntimeError):
            return Flow()
    return _of_object(owner, name)


def _of_object(owner: Any, name: str) -> Any:
    there, value = quiet.static(owner, name)
    if isinstance(value, property | functools.cached_property):
        return _getter(owner, value)
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return Bound(type(owner), value.__func__, name)
    method = None if name in getattr(owner, "__dict__", {}) else _method(owner, value, name)
    if method is not None:
        return method
    opaque = inspect.isdatadescriptor(value) or inspect.ismethoddescriptor(value)
    return abstract(value) if there and not opaque else Flow()


def _method(owner: Any, value: Any, name: str) -> Bound | None:
    """Return a method of an object, some arguments of which its class may have given; None for anything else."""
    if isinstance(value, functools.partialmethod) and inspect.isfunction(value.func):
        given = {key: abstract(item) for key, item in value.keywords.items()}
        return Bound(owner, value.func, name, tuple(map(abstract, value.args)), given)
    return Bound(owner, value, name) if inspect.isfunction(value) else None


def _getter(owner: Any, value: property | functools.cached_property[Any]) -> Property | Flow:
    """Return a property whose getter is still to be read."""
    function = value.func if isinstance(value, functools.cached_property) else value.fget
    return Property(owner, function) if function else Flow()


def _of_class(owner: type, name: str) -> Any:
    if issubclass(owner, torch.autograd.Function) and name == "apply":
        return owner.apply
    if issubclass(owner, Enum) and name in owner.__members__:
        return owner.__members__[name]
    value = inspect.getattr_static(owner, name, None)
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return Bound(owner, value.__func__, name)
    return Flow() if value is None or inspect.isdatadescriptor(value) else abstract(value)


def _module_attribute(module: nn.Module, name: str) -> Any:
    made = _made_weight(module, name)
    if made is not None:
        return made
    for table in (module._parameters, module._modules, module._buffers, module.__dict__):
        if name in table and name != "training":
            return abstract(table[name])
    return Flow() if name == "training" else _class_attribute(module, name)


def _made_weight(module: nn.Module, name: str) -> Weight | None:
    """Return a weight that a parametrization, or a hook before each forward, makes of other parameters."""
    found = made_of(module, name)
    return whole_weight(*found) if found else None


def _class_attribute(module: nn.Module, name: str) -> Any:
    value = inspect.getattr_static(type(module), name, None)
    if isinstance(value, property | functools.cached_property):
        return _getter(module, value)
    if isinstance(value, staticmethod):
        return value.__func__
    if isinstance(value, classmethod):
        return Bound(type(module), value.__func__, name)
    if name in ("forward", "__call__"):
        return Bound(module, forward_of(module), "forward")
    return _method(module, value, name) or abstract(value)


def items_of(trace: Trace, value: Any) -> list[Any]:
    """Return what a loop over a value sees; of long plain sequences the two ends."""
    if isinstance(value, Weight):  # its rows
        return [taken(value, 0, None) if value.shape and value.axes else value]
    if isinstance(value, Flow) and value.one_hot:
        return [evolve(trace.unknown(value), one_hot=True, coded=value.coded)] * 2
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


def merge_values(first: Any, second: Any) -> Any:
    """Return a value that may be either of two: what two branches left in one variable."""
    if first is second or second is None:
        return first
    if first is None:
        return second
    if isinstance(first, Flow) and isinstance(second, Flow):
        keep = first if first.piece is not None or second.tensor is None else second
        return Flow(first.deps | second.deps, keep.tensor, keep.piece)
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


def _with_items(flow: Flow, other: Any) -> Flow:
    """Return an activation that may as well be a list: of several outputs, say, while the model trains."""
    deps = deps_of(other) if isinstance(other, list | tuple) else frozenset()
    if deps <= flow.deps:
        return flow
    return evolve(flow, deps=flow.deps | deps, call=None, held=(*held_by(flow), *held_by(other)))


def _says_more(value: Any, flow: Flow) -> bool:
    return isinstance(value, nn.Module | dict) or (isinstance(value, list | tuple) and not flow.deps)


def _equal(first: Any, second: Any) -> bool:
    return quiet.is_plain(first) and quiet.is_plain(second) and bool(first == second)
