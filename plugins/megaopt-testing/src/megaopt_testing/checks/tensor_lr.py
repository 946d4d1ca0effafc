"""A learning rate that is a tensor, as captured and compiled steps hold one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.snapshot import params_of
from megaopt_testing.trial import Trial, some

__all__ = ["check_tensor_lr"]

_FACTORS = (1.0, 0.5, 0.25)
_CLOSE = 1e-5


def check_tensor_lr(optimizer: str, **settings: Any) -> None:
    """A learning rate may be a tensor: steps are those of the same number, the tensor is read and never written.

    Schedulers fill such a tensor in place, so that whoever holds it sees the new value.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a step raises, changes or replaces the tensor, or goes elsewhere than with the number.
    """
    trial = Trial(optimizer, settings)
    ends = [_stepped(trial, as_tensor=as_tensor) for as_tensor in (False, True)]
    other = [
        name
        for name, (before, after) in ends[0].items()
        if (ends[1][name][1] - after).norm() > _CLOSE * (after - before).norm() + 1e-6 * after.norm()
    ]
    if other:
        trial.fail(
            f"a learning rate that is a tensor gives other values of {some(other)} than the same number. "
            'Read `group["lr"]` in every step, and keep no copy of it'
        )


def _stepped(trial: Trial, *, as_tensor: bool) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return parameters before and after steps in which somebody else changes the learning rates."""
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    before = params_of(built)
    first = [float(torch.tensor(group["lr"])) for group in built.param_groups]
    tensors = [torch.tensor(lr) for lr in first]
    if as_tensor:
        for group, lr in zip(built.param_groups, tensors, strict=True):
            group["lr"] = lr
    for step, factor in enumerate(_FACTORS):
        if as_tensor:
            for lr, value in zip(tensors, first, strict=True):
                lr.fill_(value * factor)
            _step_with(trial, model, built, step, tensors)
        else:
            for group, value in zip(built.param_groups, first, strict=True):
                group["lr"] = value * factor
            trial.step_given(model, built, step)
    return {name: (before[name], value) for name, value in params_of(built).items()}


def _step_with(
    trial: Trial, model: nn.Module, built: MegatronOptimizer, step: int, tensors: list[torch.Tensor]
) -> None:
    """Take a step, which has to leave the learning rates alone."""
    wanted = [lr.clone() for lr in tensors]
    try:
        trial.step_given(model, built, step)
    except MegaoptError:
        raise
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        trial.fail(f"a step raises {type(error).__name__} for a learning rate that is a tensor: {error}")
    kept = all(group["lr"] is lr for group, lr in zip(built.param_groups, tensors, strict=True))
    if not kept or any(not torch.equal(lr, want) for lr, want in zip(tensors, wanted, strict=True)):
        trial.fail("a step changes or replaces the tensor that is its learning rate")
