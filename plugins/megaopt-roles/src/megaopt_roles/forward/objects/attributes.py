"""Attributes of the objects that forward sources handle: modules, classes, configurations."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch
from attrs import field, frozen
from torch import nn

from megaopt_roles.forward.objects.alternatives import Choice, abstract, one_of
from megaopt_roles.forward.sources import quiet
from megaopt_roles.forward.sources.module_classes import forward_of, home_of
from megaopt_roles.forward.sources.stored_weights import made_of
from megaopt_roles.forward.values import Flow, Weight
from megaopt_roles.forward.weights.forms import whole_weight

__all__ = ["Bound", "Property", "attribute_of", "operator_of"]

_KNOWN = ("torch", "megaopt_roles", *sys.stdlib_module_names)
"""Libraries whose operators are not read: they are known, or what the evaluator computes with."""


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


def operator_of(owner: Any, name: str) -> Bound | None:
    """Return the method by which an object answers an operator, an index or `len`; None where its class has none.

    Those of Python's own classes and of torch's modules are known without their source.

    Args:
        owner: any object.
        name: of the method, as `__truediv__`.
    """
    method = inspect.getattr_static(type(owner), name, None)
    if not inspect.isfunction(method) or (method.__module__ or "").partition(".")[0] in _KNOWN:
        return None
    return Bound(owner, method, name)


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
    if isinstance(value, types.ClassMethodDescriptorType):  # of a class of Python's own
        return value.__get__(None, owner)
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
