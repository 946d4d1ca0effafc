"""What a class keeps in attributes of its own, where neither a schedule nor a checkpoint finds it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megaopt_bridge.cutting import STEPS, Shape, alike, run_tensors
from megaopt_bridge.trials import LRS, Trial, gradient, quiet, reseed, start

__all__ = ["resumes", "unread"]

_BEFORE = 11
"""Steps before a run is taken up again: no multiple of what a class may do every few steps."""


def unread(trial: Trial, shapes: Sequence[Shape]) -> frozenset[str]:
    """Return which of `lr` and `weight_decay` change nothing where a group gives them.

    Args:
        trial: the class.
        shapes: of tensors that it takes.
    """
    lr = trial.kwargs.get("lr", 1e-3)
    tried = {"lr": (lr, lr / 4), "weight_decay": (0.0, 0.5)}
    return frozenset(key for key, values in tried.items() if _is_unread(trial, shapes, key, values))


def _is_unread(trial: Trial, shapes: Sequence[Shape], key: str, values: Sequence[float]) -> bool:
    tensors = [[(shape, seed) for seed, shape in enumerate(shapes)]]
    try:
        one, other = (
            run_tensors(Trial(_given(trial, key, value), trial.kwargs, trial.presets), tensors, STEPS).params
            for value in values
        )
    except Exception:  # noqa: BLE001 - a class may want no such key in any way
        return False
    return all(bool(value.isfinite().all()) for value in one) and alike(one, other)


def _given(trial: Trial, key: str, value: float) -> Callable[..., torch.optim.Optimizer]:
    """Return what makes the class with groups that have a value, as megaopt does."""

    def made(groups: Sequence[dict[str, Any]], **kwargs: Any) -> torch.optim.Optimizer:
        return trial.cls([{**group, key: value} for group in groups], **kwargs)

    return made


def resumes(trial: Trial, shapes: Sequence[Shape]) -> bool:
    """Return whether a new object with the state and the groups of another one goes on as that does, bit for bit.

    Args:
        trial: the class.
        shapes: of tensors that it takes.
    """
    with quiet():
        params = [torch.nn.Parameter(start(shape, seed)) for seed, shape in enumerate(shapes)]
        through = trial.make([{"params": params}])
        _advance(through, params, range(_BEFORE))
        try:
            copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
            resumed = trial.make([{"params": copies}])
            _hand_over(through, resumed)
            for optimizer, own in ((through, params), (resumed, copies)):
                reseed(1)
                _advance(optimizer, own, range(_BEFORE, STEPS))
        except Exception:  # noqa: BLE001 - a class may miss in any way what it had in an attribute
            return False
        return alike([param.detach() for param in params], [param.detach() for param in copies])


def _hand_over(through: torch.optim.Optimizer, resumed: torch.optim.Optimizer) -> None:
    for there, here in zip(through.param_groups, resumed.param_groups, strict=True):
        here.update({key: copy.deepcopy(value) for key, value in there.items() if key != "params"})
        for param, own in zip(there["params"], here["params"], strict=True):
            if param in through.state:
                resumed.state[own] = copy.deepcopy(through.state[param])


def _advance(optimizer: torch.optim.Optimizer, params: Sequence[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            if "lr" in group:  # from step to step otherwise, from where it stands
                group["lr"] = group["lr"] * LRS[step % len(LRS)] / LRS[(step - 1) % len(LRS)]
        for seed, param in enumerate(params):
            param.grad = gradient(param.shape, seed, step).clone()
        optimizer.step()
