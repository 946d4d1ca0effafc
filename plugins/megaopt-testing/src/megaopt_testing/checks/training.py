"""Training: the loss falls, and in bf16 as in fp32 the same gradients make the same steps."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megaopt_testing.trial import Trial, some

__all__ = ["check_learns", "check_precision"]

_STEPS = 50
_FALL = 0.01
_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("main parameters", {}),
    ("remainders", {"use_precision_aware_optimizer": True, "store_param_remainders": True}),
)


def check_learns(optimizer: str, **settings: Any) -> None:
    """Fifty steps on one batch lower the loss of a small GPT by a hundredth at least, and leave it finite.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; without `lr`, 0.01.

    Raises:
        ConformanceError: the loss does not fall, or is not finite.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    losses = [trial.train_step(model, built, 0) for _ in range(_STEPS)]
    if not losses[-1] <= (1 - _FALL) * losses[0]:  # false for NaN, too
        trial.fail(
            f"{_STEPS} steps on one batch take the loss of a small GPT from {losses[0]:.4f} to {losses[-1]:.4f}. "
            "If its learning rates are of another size, give the kit one: run_checks(name, lr=...)"
        )


def check_precision(optimizer: str, **settings: Any) -> None:
    """A bf16 model with fp32 main parameters is stepped as an fp32 model with the same gradients, bit for bit.

    After each step the bf16 parameters are the rounded fp32 ones, with main parameters kept whole and as remainders;
    half way between two bf16 values, either is right.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a bf16 parameter is not the rounded fp32 one.
    """
    trial = Trial(optimizer, settings)
    for what, policy in _POLICIES:
        rounded = trial.model(dtype=torch.bfloat16)
        model = copy.deepcopy(rounded).float()
        torch.manual_seed(0)
        in_bf16 = trial.build(rounded, bf16=True, **policy)
        torch.manual_seed(0)
        in_fp32 = trial.build(model)
        own = trial.own_names(in_fp32)
        for step in range(3):
            trial.step_given(rounded, in_bf16, step)
            trial.step_given(model, in_fp32, step)
            low, high = dict(rounded.named_parameters()), dict(model.named_parameters())
            other = [name for name in own if not _is_rounded(low[name].detach(), high[name].detach())]
            if other:
                trial.fail(
                    f"step {step + 1} in bf16 with {what} differs from the step in fp32 with the same gradients: "
                    f"{some(other)}. An optimizer sees fp32 tensors in both; does it look at the model instead?"
                )


def _is_rounded(low: torch.Tensor, high: torch.Tensor) -> bool:
    """Return whether every bf16 value is the one that is nearest to an fp32 value, or one of two that are."""
    nearest = high.to(torch.bfloat16)
    return torch.equal((low.double() - high.double()).abs(), (nearest.double() - high.double()).abs())
