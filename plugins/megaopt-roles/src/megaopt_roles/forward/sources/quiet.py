"""Looking at Python objects without running any of the user's code: no property, no operator, no iterator."""

from __future__ import annotations

import inspect
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn

from megaopt_roles.forward.sources.module_classes import home_of

__all__ = ["has", "is_instance", "is_plain", "items", "own_attributes", "plain_copy", "static", "truth"]

_SCALARS = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_CONTAINERS = (list, tuple, set, frozenset, torch.Size)
_DEEPEST = 4
_MISSING = object()
_OWN_EQUALITY: tuple[Any, ...] = (object.__eq__, str.__eq__, int.__eq__, type.__eq__)


class _Plain:
    """What is as large has nothing but attributes: no slots, and nothing that C code keeps."""


def is_plain(value: Any, depth: int = 0) -> bool:
    """True for numbers, strings, types and containers of them: what Python's own operators may be applied to.

    Args:
        value: any object.
        depth: how deep inside of containers it stands.
    """
    kind = type(value)
    if kind in _SCALARS or home_of(kind) == "numpy" or isinstance(value, type):
        return True
    if isinstance(value, Enum):
        return kind.__eq__ in _OWN_EQUALITY and "__hash__" not in vars(kind)
    if depth > _DEEPEST:
        return False
    if kind is dict:
        return all(is_plain(part, depth + 1) for pair in value.items() for part in pair)
    return kind in _CONTAINERS and all(is_plain(part, depth + 1) for part in value)


def truth(value: Any) -> bool | None:
    """Return whether an object is true; None where only its own code could tell."""
    if is_plain(value) or type(value) in (dict, *_CONTAINERS):
        return bool(value)
    if isinstance(value, nn.Module):
        return True
    kind = type(value)
    asks = inspect.getattr_static(kind, "__bool__", None), inspect.getattr_static(kind, "__len__", None)
    return True if asks == (None, None) else None


def is_instance(value: Any, kinds: Any) -> bool | None:
    """Return `isinstance(value, kinds)`; None where a class of the user's has a say in it."""
    wanted = kinds if isinstance(kinds, tuple) else (kinds,)
    for kind in wanted:
        known = isinstance(kind, type | types.UnionType)
        if not known or home_of(type(kind)).partition(".")[0] not in (
            "builtins",
            "abc",
            "enum",
            "torch",
            "types",
        ):
            return None
    return isinstance(value, kinds)


def plain_copy(value: Any) -> Any:
    """Return a container that may be changed without changing the model that it came from.

    What is a subclass of a list, a dictionary or a set becomes one: its own methods are not run.
    """
    if isinstance(value, list):
        return [plain_copy(item) for item in list.copy(value)]
    if isinstance(value, dict):
        return {key: plain_copy(item) for key, item in dict.copy(value).items()}
    if isinstance(value, set):
        return {*set.__iter__(value)}
    return tuple(map(plain_copy, value)) if type(value) is tuple else value


def items(value: Any) -> list[Any] | None:
    """Return what a container holds; None for anything that iterates in a way of its own."""
    if isinstance(value, nn.ModuleDict):
        return list(value._modules) if type(value).__iter__ is nn.ModuleDict.__iter__ else None
    if isinstance(value, nn.ModuleList | nn.Sequential):
        own = type(value).__iter__ in (nn.ModuleList.__iter__, nn.Sequential.__iter__)
        return list(value._modules.values()) if own else None
    if isinstance(value, nn.ParameterDict):
        return list(value._parameters) if type(value).__iter__ is nn.ParameterDict.__iter__ else None
    if isinstance(value, nn.ParameterList):
        return list(value) if type(value).__iter__ is nn.ParameterList.__iter__ else None
    kinds: tuple[type, ...] = (
        dict,
        range,
        str,
        type({}.keys()),
        type({}.values()),
        type({}.items()),
        *_CONTAINERS,
    )
    return list(value) if type(value) in kinds else None


def static(owner: Any, name: str) -> tuple[bool, Any]:
    """Look an attribute of a plain object up: its own dictionary, its slots, its class.

    Args:
        owner: any object but a module of torch.
        name: of the attribute. An `attribute_map` of the class, as configurations of transformers have it, is
            followed.

    Returns:
        Whether there is one, and its value; a property or a function of the class is returned as it stands there.
    """
    kind = type(owner)
    names = inspect.getattr_static(kind, "attribute_map", None)
    if type(names) is dict and isinstance(names.get(name), str):
        name = names[name]
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        own = {}
    if type(own) is dict and name in own:
        return True, own[name]
    found = inspect.getattr_static(kind, name, _MISSING)
    if isinstance(found, types.MemberDescriptorType):
        try:
            return True, found.__get__(owner)
        except AttributeError:
            return False, None
    if isinstance(owner, tuple) and name in getattr(kind, "_fields", ()):
        return True, tuple.__getitem__(owner, kind._fields.index(name))
    if found is _MISSING and isinstance(owner, dict) and name in dict.keys(owner):
        return True, dict.__getitem__(owner, name)
    return found is not _MISSING, None if found is _MISSING else found


def own_attributes(owner: Any) -> dict[str, Any] | None:
    """Return the attributes of a plain object; None for one that holds anything beside them, and for a module.

    Args:
        owner: any object.
    """
    kind = type(owner)
    if kind.__basicsize__ != _Plain.__basicsize__ or kind.__itemsize__ or isinstance(owner, nn.Module):
        return None
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return None
    return own if type(own) is dict else None


def has(owner: Any, names: Sequence[str]) -> bool:
    """True for an object that has every one of some attributes.

    Args:
        owner: any object.
        names: of the attributes.
    """
    for name in names:
        tables = (owner._parameters, owner._modules, owner._buffers) if isinstance(owner, nn.Module) else ()
        if not any(name in table for table in tables) and not static(owner, name)[0]:
            return False
    return True
