"""Classes of modules: where they come from, what runs when one is called, and their other methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megaopt_roles.forward.sources.trees import function_tree

__all__ = ["adapted_layer", "forward_of", "home_of", "is_readable", "own_methods", "torchs_class"]

_ONLY_MAKE = frozenset(["__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters"])
"""Methods that a subclass of a module of torch may have while its forward stays that module's."""

_UNREAD: Callable[..., Any] = print
"""Stands for a function without a source."""


def home_of(kind: type) -> str:
    """Return the name of the Python module that a class comes from; empty where it was made without one.

    Args:
        kind: any class.
    """
    try:
        home = type.__getattribute__(kind, "__module__")
    except AttributeError:
        return ""
    return home if isinstance(home, str) else ""


def torchs_class(kind: type) -> type:
    """Return the module of torch that a class only makes in another way: its own `__init__`, nothing else.

    Args:
        kind: a class of modules.

    Returns:
        The class itself where it adds more, or comes from none of torch's with a forward.
    """
    for base in kind.__mro__:
        if home_of(base).startswith("torch."):
            return kind if base is nn.Module else base
        own = {name for name, value in vars(base).items() if hasattr(value, "__get__")}
        if any(not name.startswith("__annotat") for name in own - _ONLY_MAKE):
            return kind
    return kind


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the function that runs when a module is called; None for one that has no `forward` of its own.

    Args:
        module: any module.
    """
    own = module.__dict__.get("forward")
    if own is not None:  # replaced on the instance
        bound = inspect.ismethod(own) and own.__self__ is module
        return own.__func__ if bound else _UNREAD
    forward: Callable[..., Any] | None = getattr(type(module), "forward", None)
    if forward is None or forward is nn.Module.forward:
        return None
    return _behind_closure(forward, type(module))


def is_readable(module: nn.Module) -> bool:
    """False for a module whose forward was replaced by something without a source.

    Args:
        module: any module.
    """
    return forward_of(module) is not _UNREAD


def own_methods(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the plain methods that a module's classes define beside `forward`, helper classes of torch left out.

    Args:
        module: any module.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for base in type(module).__mro__:
        if home_of(base).split(".")[0] == torch.__name__:
            break
        for name, value in vars(base).items():
            if inspect.isfunction(value) and not name.startswith("__") and name != "forward":
                methods.setdefault(name, value)
    return list(methods.values())


def _behind_closure(function: Callable[..., Any], owner: type) -> Callable[..., Any]:
    """Return the original `forward` behind a decorator that hides it in its closure."""
    plain: Callable[..., Any] = inspect.unwrap(function)
    if function_tree(plain) is None or plain.__name__ == "forward":
        return plain
    for cell in plain.__closure__ or ():
        try:
            inner: Callable[..., Any] = cell.cell_contents
        except ValueError:
            continue
        if inspect.isfunction(inner) and inner.__name__ == "forward" and inner.__module__ == home_of(owner):
            return inner
    return plain


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that an adapter holds as `base_layer`, beside factors that are layers as well.

    Where factors are bare parameters, the adapter's forward says more: nothing is returned.

    Args:
        module: any module.
    """
    bare = any(param is not None and param.dim() > 1 for param in module._parameters.values())
    return None if bare else module._modules.get("base_layer")
