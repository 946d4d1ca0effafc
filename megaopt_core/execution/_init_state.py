"""Learning what state an optimizer keeps that says nothing about it: by a step of a copy of it."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from megaopt_core.errors import PluginError
from megaopt_core.execution._copies import Copies
from megaopt_core.sharding._split_step import SplitStep

__all__ = ["probe_state"]

_ZEROED = ("lr", "weight_decay")
_ATTEMPTS = ((0.0, _ZEROED), (0.0, ()), (1e-3, ()))
"""Gradients and what is zero in a step that only makes state; some optimizers divide by learning rates or norms."""


@torch.no_grad()
def probe_state(inner: torch.optim.Optimizer, split: SplitStep | None = None) -> None:
    """Let a copy of an optimizer make its state by a step on zero gradients, and give that state to the optimizer.

    The state has the right keys, shapes and dtypes; its values are of no use. Nothing else changes: the copy steps
    copies of the parameters. A step that fails with learning rate zero is tried with the real one, and then on small
    gradients; an optimizer that fails then too is left without state.

    Args:
        inner: an optimizer that has not stepped yet.
        split: its step in three parts, of which the first makes the state; None: the whole step does.

    Raises:
        PluginError: its step needs a closure: it evaluates the model several times a step, which no pipeline of norm,
            clip and step can do.
    """
    _refuse_closures(inner)
    params = [param for group in inner.param_groups for param in group["params"]]
    if not params:
        return
    for value, zeroed in _ATTEMPTS:
        made = _states_of_trial(inner, split, params, value, zeroed)
        if made is not None:
            inner.state.update(made)
            return


def _states_of_trial(
    inner: torch.optim.Optimizer,
    split: SplitStep | None,
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
            if split is not None:
                copies.of(split).local_updates(copies.of(params))
            else:
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


def _refuse_closures(inner: torch.optim.Optimizer) -> None:
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"{type(inner).__name__}.step needs a closure: it evaluates the model several times a step, and megaopt "
            "collects, clips and steps once"
        )
