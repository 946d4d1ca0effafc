"""Gradient descent by the direction alone: of a whole tensor, though this rank may have a part of it."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT


class NormedSGD(torch.optim.Optimizer):
    """`p <- p - lr * grad / |grad|`, with the norm of the whole tensor, and momentum of that."""

    def __init__(self, params: ParamsT, lr: float, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                total = param.grad.double().square().sum()
                peers = param.param_info.peers
                if peers is not None:
                    dist.all_reduce(total, group=peers.group)
                buffer = self.state[param].setdefault("momentum", torch.zeros_like(param))
                buffer.mul_(group["momentum"]).add_((param.grad / total.sqrt()).to(param.dtype))
                param.sub_(buffer, alpha=group["lr"])
