"""Signum for megaopt: SGD with the sign of the momentum (Bernstein et al., 2018, arXiv:1802.04434)."""

import torch
from attrs import field, frozen

from megaopt_core import OptimizerEntry, hookimpl
from megaopt_core.config import between

megaopt_api = "1"
ABOUT = "every weight moves by the learning rate, against the sign of its momentum"
STATE = {"momentum": "param"}


class Signum(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["beta"])
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(momentum.sign(), alpha=group["lr"])


@frozen
class SignumSettings:
    beta: float = field(default=0.9, validator=between(0.0, 1.0), metadata={"help": "decay rate of momentum"})


@hookimpl
def megaopt_optimizer_entries():
    """Offer `signum`."""
    entry = OptimizerEntry(
        Signum, settings=SignumSettings, setting_prefixes=("signum",), state=STATE, description=ABOUT
    )
    return {"signum": entry}
