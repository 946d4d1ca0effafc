"""Published optimizers as somebody else would write them: variants of Adam, and one that is free of a schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from attrs import field, frozen

from megaopt_core import OptimizerEntry
from megaopt_core.config import between, not_negative


class _ByParameter(torch.optim.Optimizer):
    """Calls `update` for every parameter that has a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, self.state[param])

    def moments(
        self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> tuple[int, Any, Any]:
        """Return the step, and both moments, corrected for their beginning."""
        beta1, beta2 = group["betas"]
        if "step" not in state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        first = state["exp_avg"].lerp_(param.grad, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        return state["step"], first / (1 - beta1 ** state["step"]), second / (1 - beta2 ** state["step"])


class AdEMAMix(_ByParameter):
    """A second, slow momentum beside that of Adam (Pagliardini et al., 2024)."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any = (0.9, 0.999),
        slow_beta: float = 0.9999,
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        given = {"lr": lr, "betas": betas, "slow_beta": slow_beta, "alpha": alpha, "eps": eps}
        super().__init__(params, {**given, "weight_decay": weight_decay})

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        _, first, second = self.moments(param, group, state)
        slow = state.setdefault("slow", torch.zeros_like(param)).lerp_(param.grad, 1 - group["slow_beta"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((first + group["alpha"] * slow) / (second.sqrt() + group["eps"]) * group["lr"])


class _AdamLike(_ByParameter):
    def __init__(
        self,
        params: Any,
        lr: float,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class StableAdamW(_AdamLike):
    """Goes less far where a tensor's second moment is out of date (Wortsman et al., 2023)."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        _, first, second = self.moments(param, group, state)
        rms = (param.grad.square() / second.clamp_min(group["eps"] ** 2)).mean().sqrt()
        lr = group["lr"] / rms.clamp_min(1.0)
        param.mul_(1 - lr * group["weight_decay"])
        param.sub_(first / (second.sqrt() + group["eps"]) * lr)


class AdamP(_AdamLike):
    """Takes the part of a step that only makes the weights longer away (Heo et al., 2021)."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        _, first, second = self.moments(param, group, state)
        step = first / (second.sqrt() + group["eps"])
        along = torch.nn.functional.cosine_similarity(
            param.grad.flatten(), param.flatten(), dim=0, eps=group["eps"]
        )
        if param.ndim > 1 and along.abs() < 0.1 / math.sqrt(param.numel()):
            unit = param / param.norm().clamp_min(group["eps"])
            step = step - unit * (unit * step).sum()
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(step * group["lr"])


class ScheduleFreeSGD(_ByParameter):
    """Averages of iterates instead of a schedule (Defazio et al., 2024); the model holds `y` while it trains."""

    def __init__(
        self, params: Any, lr: float, beta: float = 0.9, lr_power: float = 2.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "lr_power": lr_power, "weight_decay": weight_decay})

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if "z" not in state:
            state["z"], state["weights"] = param.clone(), 0.0
        lr, grad = group["lr"], param.grad + group["weight_decay"] * param
        weight = float(lr) ** group["lr_power"] if lr else 0.0
        state["weights"] += weight
        share = weight / state["weights"] if state["weights"] else 0.0
        param.lerp_(state["z"], share)
        param.add_(grad * (lr * (group["beta"] * (1 - share) - 1)))
        state["z"].sub_(grad * lr)


@frozen
class MixSettings:
    """What AdEMAMix takes."""

    slow_beta: float = field(
        default=0.9999, validator=between(0.0, 1.0), metadata={"help": "of the slow momentum"}
    )
    alpha: float = field(
        default=5.0, validator=between(0.0, 100.0), metadata={"help": "weight of the slow momentum"}
    )
    eps: float = field(default=1e-8, validator=not_negative(), metadata={"help": "added to the denominator"})


@frozen
class FreeSettings:
    """What schedule-free SGD takes; the power acts while the learning rate changes, and at no other time."""

    beta: float = field(
        default=0.9, validator=between(0.0, 1.0), metadata={"help": "weight of the average in `y`"}
    )
    lr_power: float = field(
        default=2.0, validator=between(0.0, 8.0), metadata={"help": "of the learning rate in weights"}
    )


ADAM = "torch.optim:AdamW"
ENTRIES: dict[str, Callable[[], OptimizerEntry]] = {
    "ademamix": lambda: OptimizerEntry(
        AdEMAMix, settings=MixSettings, setting_prefixes=("ademamix",), same_as=ADAM
    ),
    "stable_adamw": lambda: OptimizerEntry(StableAdamW, granularity="tensor", same_as=ADAM),
    "adamp": lambda: OptimizerEntry(AdamP, granularity="tensor", same_as=ADAM),
    "schedule_free_sgd": lambda: OptimizerEntry(
        ScheduleFreeSGD, settings=FreeSettings, setting_prefixes=("free",)
    ),
}
"""Name to entry; those that share Adam's first steps say so."""
