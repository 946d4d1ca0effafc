"""Making optimizer state before the first step, exactly as torch would make it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig

__all__ = ["init_adam_state", "init_sgd_state"]


@torch.no_grad()
def init_adam_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make `step`, `exp_avg`, `exp_avg_sq` (and `max_exp_avg_sq` with amsgrad), all zero, for every parameter.

    Args:
        optimizer: a `torch.optim.Adam` or `AdamW`; parameters that have state keep it.
        config: not used.
    """
    for group in optimizer.param_groups:
        on_device = group["capturable"] or group["fused"]
        for param in group["params"]:
            state = optimizer.state[param]
            if state:
                continue
            step_dtype = (
                torch.float64
                if torch.get_default_dtype() == torch.float64 and not group["fused"]
                else torch.float32
            )
            state["step"] = torch.zeros((), dtype=step_dtype, device=param.device if on_device else "cpu")
            for key in ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ()):
                state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)


@torch.no_grad()
def init_sgd_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig | None = None) -> None:
    """Make zero `momentum_buffer`s, from which the first step arrives at what torch's first step makes.

    torch clones the first gradient; with a zero buffer `momentum * 0 + (1 - dampening) * gradient` is the same while
    dampening is 0. Groups with dampening or without momentum get no state before their first step.

    Args:
        optimizer: a `torch.optim.SGD`; parameters that have state keep it.
        config: not used.
    """
    for group in optimizer.param_groups:
        if group["momentum"] == 0.0 or group["dampening"] != 0.0:
            continue
        for param in group["params"]:
            state = optimizer.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
