"""Full precision: what is kept in float32 is computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import Trial, some

__all__ = ["check_full_precision"]

_STEPS = 3
_LESS: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_FEWEST = 32

type _Kept = dict[str, dict[str, torch.Tensor]]


def check_full_precision(optimizer: str, **settings: Any) -> None:
    """Parameters and state in float32 use its precision, and gradients are read in it.

    Of random numbers in float32 one in 8,192 is a float16, one in 65,536 a bfloat16. Where more than half of a tensor's
    values are, something rounded them. Where rounded gradients lead to the very bits that full ones lead to, they were
    rounded anyway. Tensors of few different values, such as signs, say nothing.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: parameters or state are rounded, or gradients are.
    """
    trial = Trial(optimizer, settings)
    full = _stepped(trial, lambda grad: grad)
    for what, dtype in _LESS.items():
        rounded = {
            f"{key} of {name}"
            for name, kept in full.items()
            for key, value in kept.items()
            if _is_rounded(value, dtype)
        }
        if rounded:
            trial.fail(
                f"{some(sorted(rounded))} are float32 but hold only {what} numbers. Compute in the dtype of "
                "the parameter; to keep fewer bits, declare them in `state_dtypes`"
            )
        less = _stepped(trial, lambda grad, dtype=dtype: grad.to(dtype).float())  # type: ignore[misc] # a default
        deaf = [
            name
            for name, kept in full.items()
            if len(kept) > 1 and all(same_bits(value, less[name].get(key)) for key, value in kept.items())
        ]
        if deaf:
            trial.fail(
                f"rounding the gradients to {what} changes no bit of {some(deaf)} and their state: the step "
                "rounds gradients first. Read `param.grad` in its own dtype"
            )


def _stepped(trial: Trial, change: Callable[[torch.Tensor], torch.Tensor]) -> _Kept:
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    for step in range(_STEPS):
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = change(torch.randn(param.shape, generator=chance))
        built.step()
    return _kept(built, set(trial.own_names(built)))


def _kept(built: MegatronOptimizer, own: set[str]) -> _Kept:
    """Return the value, and the float32 state of the same size, of every parameter that is large enough."""
    return {
        name: {
            "the values": param.detach().clone(),
            **{
                f"state {key!r}": value.detach().clone()
                for key, value in built.state[param].items()
                if type(value) is torch.Tensor and value.dtype is torch.float32 and value.shape == param.shape
            },
        }
        for param, name in built.names.items()
        if name in own and param.numel() >= _FEWEST
    }


def _is_rounded(values: torch.Tensor, dtype: torch.dtype) -> bool:
    values = values[values != 0]
    if values.numel() < _FEWEST or values.unique().numel() < values.numel() / 2:
        return False
    return bool((values.to(dtype).float() == values).float().mean() > 0.5)
