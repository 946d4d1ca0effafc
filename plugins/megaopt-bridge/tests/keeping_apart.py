"""Optimizer classes that keep in attributes what groups, or states, should have."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Base(Optimizer):
    """Gradient descent, by parts that others replace."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.own_lr = lr

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.one(param, group)

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Step one parameter."""
        param.sub_(param.grad, alpha=group["lr"])


class KeepsItsRate(Base):
    """Reads the learning rate once."""

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Step by the first learning rate."""
        param.sub_(param.grad, alpha=self.own_lr)


class KeepsItsDecay(Base):
    """Reads its weight decay once."""

    def __init__(self, params: ParamsT, lr: float = 1e-2, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr)
        self.own_decay = weight_decay

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Decay by the first weight decay."""
        param.mul_(1 - group["lr"] * self.own_decay)
        super().one(param, group)


class DecaysByItsGroup(Base):
    """Has no argument for weight decay, and reads that of its group."""

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Decay."""
        param.mul_(1 - group["lr"] * group.get("weight_decay", 0.0))
        super().one(param, group)


class KeepsItsMomentum(Base):
    """Has momentum that no state dict holds."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Step by the momentum."""
        kept = self.momentum.setdefault(param, torch.zeros_like(param))
        param.sub_(kept.mul_(0.9).add_(param.grad), alpha=group["lr"])


class WarmsUpByItself(Base):
    """Counts its steps in an attribute."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Count."""
        self.count += 1
        super().step(closure)

    def one(self, param: torch.Tensor, group: dict) -> None:
        """Step by a part of the learning rate, at first."""
        param.sub_(param.grad, alpha=group["lr"] * min(1.0, self.count / 20))
