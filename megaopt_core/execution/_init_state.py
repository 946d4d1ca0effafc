"""Learning what state an optimizer keeps that says nothing about it: by a step that leaves no trace."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from megaopt_core.errors import PluginError
from megaopt_core.execution._undo import remember

__all__ = ["probe_state"]

_ZEROED = ("lr", "weight_decay")
_ATTEMPTS = ((0.0, _ZEROED), (0.0, ()), (1e-3, ()))
"""Gradients and what is zero in a step that only makes state; some optimizers divide by learning rates or norms."""


@torch.no_grad()
def probe_state(
    inner: torch.optim.Optimizer, make: Callable[[list[torch.Tensor]], Any] | None = None
) -> None:
    """Let an optimizer make its state by a step on zero gradients, and undo all else that the step did.

    Parameters, gradients, groups, the optimizer's attributes, hooks and the random state are as before. The state that
    is left has the right keys, shapes and dtypes; its values are of no use. A step that fails with learning rate zero
    is tried with the real one, and then on small gradients; an optimizer that fails then too is left without state.

    Args:
        inner: an optimizer that has not stepped yet.
        make: is called with the parameters in place of the step, and makes their state.

    Raises:
        PluginError: its step needs a closure: it evaluates the model several times a step, which no pipeline of norm,
            clip and step can do.
    """
    _refuse_closures(inner)
    params = [param for group in inner.param_groups for param in group["params"]]
    if not params:
        return
    for value, zeroed in _ATTEMPTS:
        if _step(inner, params, make, value, zeroed):
            return


def _step(
    inner: torch.optim.Optimizer,
    params: list[torch.Tensor],
    make: Callable[[list[torch.Tensor]], Any] | None,
    value: float,
    zeroed: Sequence[str],
) -> bool:
    """Let the state be made on gradients of one value, undo all else, and return whether that went well."""
    with _undone(inner, params):
        for group in inner.param_groups:
            for key in zeroed:
                if key in group:
                    is_tensor = isinstance(group[key], torch.Tensor)
                    group[key] = torch.zeros_like(group[key]) if is_tensor else 0.0
        for param in params:
            param.grad = torch.full_like(param, value)
        try:
            if callable(
                train := getattr(inner, "train", None)
            ):  # schedule-free optimizers refuse to step before
                train()
            if make is not None:
                make(params)
            else:
                # The class's own step: a scheduler that counts calls of the instance's must not count this one.
                type(inner).step(inner)
        except Exception:  # noqa: BLE001 - whatever it is, the optimizer's real steps do not begin so
            for param in params:
                inner.state.pop(param, None)
            return False
    return True


@contextlib.contextmanager
def _undone(inner: torch.optim.Optimizer, params: list[torch.Tensor]) -> Iterator[None]:
    grads = [param.grad for param in params]
    state, present = inner.state, set(inner.state)
    attributes = {key: value for key, value in vars(inner).items() if key != "state"}
    restore = remember(attributes)
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(inner, hooks, OrderedDict())
    try:
        with torch.random.fork_rng(devices=_accelerators(params)):
            yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        vars(inner).clear()
        vars(inner).update(restore(), state=state)
        for key in [key for key in state if key not in present and not isinstance(key, torch.Tensor)]:
            del state[key]


def _refuse_closures(inner: torch.optim.Optimizer) -> None:
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"{type(inner).__name__}.step needs a closure: it evaluates the model several times a step, and megaopt "
            "collects, clips and steps once"
        )


def _accelerators(params: Iterable[torch.Tensor]) -> list[torch.device]:
    return sorted({param.device for param in params if param.device.type == "cuda"}, key=str)
