"""Learning what state an optimizer keeps that says nothing about it: by a step of a copy of it."""

from __future__ import annotations

import copy
import inspect
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import PluginError

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig

__all__ = ["Copies", "learn_state", "needs_closure"]

_ZEROED = ("lr", "weight_decay")
_ATTEMPTS = ((0.0, _ZEROED), (0.0, ()), (1e-3, ()))
"""Gradients and what is zero in a step that only makes state; some optimizers divide by learning rates or norms."""


@torch.no_grad()
def learn_state(inner: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Let a copy of an optimizer make its state by a step on zero gradients, and give that state to the optimizer.

    The state has the right keys, shapes and dtypes; its values are of no use. Nothing else changes: the copy steps
    copies of the parameters. A step that fails with learning rate zero is tried with the real one, and then on small
    gradients; an optimizer that fails then too is left without state.

    Args:
        inner: an optimizer that has not stepped yet.
        config: the run's configuration, of which nothing is asked.

    Raises:
        PluginError: its step needs a closure: it evaluates the model several times a step, which no pipeline of norm,
            clip and step can do.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.Adam([weight])
        >>> learn_state(optimizer)
        >>> list(optimizer.state[weight]), weight.tolist()
        (['step', 'exp_avg', 'exp_avg_sq'], [1.0, 1.0])
    """
    if needs_closure(type(inner)):
        raise PluginError(
            f"{type(inner).__name__}.step needs a closure, because it evaluates the model several times a step; "
            "megaopt collects gradients, clips and steps once"
        )
    params = [param for group in inner.param_groups for param in group["params"]]
    if not params:
        return
    for value, zeroed in _ATTEMPTS:
        made = _states_of_trial(inner, params, value, zeroed)
        if made is not None:
            inner.state.update(made)
            return


def _states_of_trial(
    inner: torch.optim.Optimizer,
    params: list[torch.Tensor],
    value: float,
    zeroed: Sequence[str],
) -> dict[torch.Tensor, Any] | None:
    """Step a copy on gradients of one value, and return the state that it makes; None where that fails."""
    copies = Copies()
    trial = _trial(inner, params, copies)
    for group in trial.param_groups:
        for key in zeroed:
            if key in group:
                is_tensor = isinstance(group[key], torch.Tensor)
                group[key] = torch.zeros_like(group[key]) if is_tensor else 0.0
    for param in params:
        copies.of(param).grad = torch.full_like(param, value)
    accelerators = {param.device for param in params if param.device.type == "cuda"}
    with torch.random.fork_rng(devices=accelerators):
        try:
            if callable(train := getattr(trial, "train", None)):
                train()  # schedule-free optimizers refuse to step before
            # The class's own step: a scheduler that counts calls of the instance's must not count this one.
            type(trial).step(trial)
        except Exception:  # noqa: BLE001 - whatever it is, the optimizer's real steps do not begin so
            return None
    made = ((param, trial.state.get(copies.of(param))) for param in params)
    return {param: state for param, state in made if state is not None}


def _trial(inner: torch.optim.Optimizer, params: list[torch.Tensor], copies: Copies) -> torch.optim.Optimizer:
    """Return a copy of an optimizer, of those of its parameters that are in its groups now, without its hooks."""
    kept, here = vars(inner).get("state", {}), {id(param) for param in params}
    copies.put(kept, copy.copy(kept))
    copies.of(kept).clear()
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        copies.put(getattr(inner, hooks), OrderedDict())
    trial = copies.of(inner)
    for key, state in kept.items():
        if id(key) in here or not isinstance(key, torch.Tensor):
            trial.state[copies.of(key)] = copies.of(state)
    return trial


def needs_closure(cls: type[torch.optim.Optimizer]) -> bool:
    """Return whether the step of a class cannot be called alone: it evaluates the model several times.

    Args:
        cls: the class.
    """
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


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
