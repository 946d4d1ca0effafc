"""A class whose groups have from the beginning what it puts into them in its first step, ready to train."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

__all__ = ["prepared"]


def prepared(
    cls: type[torch.optim.Optimizer],
    presets: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
    *,
    waits: bool = False,
) -> type[torch.optim.Optimizer]:
    """Return the class itself if it needs nothing, else a subclass that gives its groups what they need.

    A class with `train` and `eval` begins in training mode, as modules do.

    Args:
        cls: an optimizer class.
        presets: group key to first value; the class may overwrite it.
        given: group key to what the class has to find there when it is made.
        waits: leave a step out in which no parameter has a gradient: the class would count it.

    Example:
        >>> prepared(torch.optim.SGD, {}) is torch.optim.SGD
        True
        >>> made = prepared(torch.optim.SGD, {"step": 0})([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> type(made).__name__, made.param_groups[0]["step"]
        ('SGD', 0)
    """
    has_modes = callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None))
    if not presets and not given and not has_modes and not waits:
        return cls
    base: Any = cls
    asked = dict(given or {})

    class Prepared(base):  # type: ignore[misc] # a base that is known when the program runs
        def __init__(self, params: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            super().__init__(_with(params, asked) if asked else params, *args, **kwargs)
            for group in self.param_groups:
                for key, value in presets.items():
                    group.setdefault(key, copy.deepcopy(value))
            if has_modes:
                self.train()

    if waits:
        _wait_for_gradients(Prepared)
    Prepared.__name__, Prepared.__qualname__ = cls.__name__, cls.__qualname__
    Prepared.__module__, Prepared.__doc__ = cls.__module__, cls.__doc__
    made: type[torch.optim.Optimizer] = Prepared
    return made


def _with(params: Iterable[Any], given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return groups that have these keys."""
    listed = list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    return [{**given, **group} for group in groups]


def _wait_for_gradients(cls: Any) -> None:
    step = cls.step

    def step_with_gradients(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            return step(self, *args, **kwargs)
        return None

    cls.step = functools.wraps(step)(step_with_gradients)
