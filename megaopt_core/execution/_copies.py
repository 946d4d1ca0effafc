"""Copies of what an optimizer holds, which refer to each other as the originals do."""

from __future__ import annotations

import copy
import random
from collections import deque
from types import MethodType
from typing import Any

import torch

__all__ = ["Copies"]


class Copies:
    """Copies objects that may refer to each other: what occurs twice is copied once, also where it holds itself.

    Tensors, containers, random generators, optimizers and plain objects are copied; what else there is, such as a
    process group or a module, is shared with the original.

    Example:
        >>> shared = [torch.ones(1)]
        >>> held = {"a": shared, "b": (shared,)}
        >>> copied = Copies().of(held)
        >>> copied["a"] is copied["b"][0], copied["a"] is shared
        (True, False)
    """

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        self._kept: list[object] = []

    def of[T](self, value: T) -> T:
        """Return the copy of an object, the same one whenever it is asked for.

        Args:
            value: the original; it lives as long as this.
        """
        if id(value) not in self._made:
            self._copy(value)
        found: T = self._made[id(value)]
        return found

    def put(self, value: object, made: object) -> None:
        """Say what takes the place of an object's copy.

        Args:
            value: the original.
            made: what stands for it.
        """
        self._kept.append(value)  # no other object gets its identity
        self._made[id(value)] = made

    def _copy(self, value: Any) -> None:
        """Copy what is inside too, after the copy itself is known: what is inside may refer to it."""
        made = self._made[id(value)] = _empty(value)
        if isinstance(value, dict):
            for key, held in value.items():  # update() of a Counter counts
                made[self._key(key)] = self.of(held)
        elif isinstance(value, (list, deque)):
            made.extend(map(self.of, value))
        elif isinstance(value, set):
            made.update(map(self.of, value))
        elif isinstance(value, tuple):
            held = [self.of(each) for each in value]
            self._made[id(value)] = type(value)(*held) if hasattr(value, "_fields") else tuple(held)
        elif isinstance(value, MethodType) and isinstance(value.__self__, torch.optim.Optimizer):
            self._made[id(value)] = MethodType(value.__func__, self.of(value.__self__))
        elif made is not value and _is_plain(value):
            for name in _attributes(value):
                object.__setattr__(made, name, self.of(getattr(value, name)))

    def _key(self, key: Any) -> Any:
        """Return a dictionary's key: a copied tensor, or its identity, by which some optimizers know parameters."""
        found = self._made.get(key) if type(key) is int else None
        return id(found) if isinstance(found, torch.Tensor) else self.of(key)


def _empty(value: Any) -> Any:
    """Return a copy without what is inside; the object itself where it is not copied."""
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (dict, list, set, deque)):
        made = copy.copy(value)
        made.clear()
        return made
    if isinstance(value, (random.Random, bytearray)) or hasattr(value, "__array_interface__"):
        return copy.copy(value)
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).set_state(value.get_state())
    return object.__new__(type(value)) if _is_plain(value) else value


def _tensor(value: torch.Tensor) -> torch.Tensor:
    if value.layout == torch.strided and 0 in value.stride() and value.numel() > 1:
        return value  # one element shown many times: a tensor without memory of its own
    made = value.detach().clone()
    if isinstance(value, torch.nn.Parameter):
        made = torch.nn.Parameter(made, value.requires_grad)
    for name, held in vars(value).items():
        vars(made).setdefault(name, held)  # such as `param_info`
    return made


def _attributes(value: Any) -> list[str]:
    """Return the names of what an object holds, in a dictionary or in slots."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    held = [name for name in slots if not name.startswith("__") and hasattr(value, name)]
    return [*getattr(value, "__dict__", ()), *held]


def _is_plain(value: Any) -> bool:
    """Return whether all that an object is are its attributes."""
    kind = type(value)
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (type, torch.nn.Module)) or not _attributes(value):
        return False
    own = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    return not own and kind.__module__.partition(".")[0] not in ("builtins", "torch", "types")
