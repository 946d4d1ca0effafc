"""Putting objects back to what they were, in place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["remember"]


def remember(value: Any) -> Callable[[], Any]:
    """Copy what a value holds, and return a function that puts it back into the same objects.

    Tensors, dictionaries, lists, tuples, sets, random generators and optimizers are followed; anything else is kept as
    the object that it is. What occurs twice is copied once.

    Args:
        value: what will be changed.

    Returns:
        A function that restores and returns `value`.

    Example:
        >>> settings = {"betas": [0.9, 0.99]}
        >>> restore = remember(settings)
        >>> settings["betas"][0], settings["k"] = 0.5, 1
        >>> restore() is settings, settings
        (True, {'betas': [0.9, 0.99]})
    """
    return _Memory().remember(value)


class _Memory:
    """What has been copied, by identity, so that shared and circular references stay what they are."""

    def __init__(self) -> None:
        self._known: dict[int, Callable[[], Any]] = {}

    def remember(self, value: Any) -> Callable[[], Any]:
        known = self._known.get(id(value))
        if known is None:
            self._known[id(value)] = lambda: value  # for a container that holds itself
            known = self._known[id(value)] = self._restorer(value)
        return known

    def _restorer(self, value: Any) -> Callable[[], Any]:
        if isinstance(value, torch.Tensor):
            return _of_tensor(value)
        if isinstance(value, torch.optim.Optimizer):  # one around another
            return _with(value, lambda restore: restore(), self.remember(vars(value)))
        if isinstance(value, dict):
            return self._of_dict(value)
        if isinstance(value, list):
            return self._of_list(value)
        if isinstance(value, set):
            return _of_set(value)
        if isinstance(value, tuple):
            return self._of_tuple(value)
        if isinstance(value, random.Random):
            return _with(value, value.setstate, value.getstate())
        if isinstance(value, torch.Generator):
            return _with(value, value.set_state, value.get_state())
        return lambda: value

    def _of_dict(self, value: dict[Any, Any]) -> Callable[[], Any]:
        inside = {key: self.remember(held) for key, held in value.items()}

        def restore() -> dict[Any, Any]:
            restored = {key: held() for key, held in inside.items()}
            value.clear()
            value.update(restored)
            return value

        return restore

    def _of_list(self, value: list[Any]) -> Callable[[], Any]:
        inside = [self.remember(held) for held in value]

        def restore() -> list[Any]:
            value[:] = [held() for held in inside]
            return value

        return restore

    def _of_tuple(self, value: tuple[Any, ...]) -> Callable[[], Any]:
        inside = [self.remember(held) for held in value]

        def restore() -> tuple[Any, ...]:
            for held in inside:
                held()
            return value

        return restore


def _of_tensor(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    if value.layout == torch.strided and 0 in value.stride() and value.numel() > 1:
        return lambda: value  # one element shown many times: a tensor without memory of its own
    saved = value.detach().clone()

    def restore() -> torch.Tensor:
        with torch.no_grad():
            value.copy_(saved)
        return value

    return restore


def _of_set(value: set[Any]) -> Callable[[], set[Any]]:
    saved = set(value)

    def restore() -> set[Any]:
        value.clear()
        value.update(saved)
        return value

    return restore


def _with[T](value: T, setter: Callable[[Any], object], saved: Any) -> Callable[[], T]:
    def restore() -> T:
        setter(saved)
        return value

    return restore
