"""Hooks after the forward of a module: functions that see its output, and may change it or keep it elsewhere."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import nn

from megaopt_roles.forward.sources.trees import function_tree

__all__ = ["hooked_inside", "readable_hooks"]


def readable_hooks(module: nn.Module) -> list[tuple[Any, bool]]:
    """Return the hooks whose source can be read, with whether each is given keyword arguments; torch's own aside.

    Args:
        module: what they are called after.
    """
    found = []
    for key, hook in module._forward_hooks.items():
        plain = hook.func if isinstance(hook, functools.partial) else hook
        function = getattr(plain, "__func__", plain)
        own = inspect.isfunction(function) and not str(function.__module__).startswith("torch.")
        if own and function_tree(function) is not None:
            found.append((hook, key in module._forward_hooks_with_kwargs))
    return found


def hooked_inside(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside of a module that hooks are called after.

    Args:
        module: any module.
    """
    return [part for part in module.modules() if part is not module and part._forward_hooks]
