"""Honest optimizers of kinds that are easily taken for faulty ones: caches, blocks, ways to compute, no state."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from attrs import field, frozen
from honest_variants import ByParameter

from megaopt_core import OptimizerEntry
from megaopt_core.config import boolean

__all__ = ["ENTRIES"]


class Lars(ByParameter):
    """Momentum at the size of the weights (You et al., 2017)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"momentum": 0.9, "trust": 0.1}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        grad = param.grad + group["weight_decay"] * param
        size, steep = param.norm(), grad.norm()
        rate = torch.where((size > 0) & (steep > 0), group["trust"] * size / steep, 1.0)
        buffer = state.setdefault("buffer", torch.zeros_like(param))
        param.sub_(buffer.mul_(group["momentum"]).add_(grad * rate) * group["lr"])


class AMSGrad(ByParameter):
    """Adam whose second moment never shrinks (Reddi et al., 2018)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.99), "eps": 1e-8}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state.update(
                step=torch.zeros(()),
                first=torch.zeros_like(param),
                second=torch.zeros_like(param),
                largest=torch.zeros_like(param),
            )
        step = float(state["step"].add_(1))
        first = state["first"].lerp_(param.grad, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        torch.maximum(state["largest"], second, out=state["largest"])
        size = (state["largest"] / (1 - beta2**step)).sqrt() + group["eps"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(first / (1 - beta1**step) / size * group["lr"])


class CenteredRMSprop(ByParameter):
    """Divides by a standard deviation instead of a mean square (Graves, 2013), with momentum."""

    SETTINGS: ClassVar[dict[str, Any]] = {"beta": 0.99, "momentum": 0.5, "eps": 1e-4}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update({key: torch.zeros_like(param) for key in ("mean", "square", "buffer")})
        grad = param.grad + group["weight_decay"] * param
        mean = state["mean"].lerp_(grad, 1 - group["beta"])
        square = state["square"].lerp_(grad * grad, 1 - group["beta"])
        size = (square - mean * mean).clamp_min(0).sqrt() + group["eps"]
        buffer = state["buffer"].mul_(group["momentum"]).add_(grad / size)
        param.sub_(buffer * group["lr"])


class Cautious(ByParameter):
    """Adam that leaves out what its gradient speaks against (Liang et al., 2024)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.99), "eps": 1e-8}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state.update(step=0, first=torch.zeros_like(param), second=torch.zeros_like(param))
        state["step"] += 1
        first = state["first"].lerp_(param.grad, 1 - beta1)
        second = state["second"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        size = (second / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        agrees = (first * param.grad > 0).to(param.dtype)
        agrees /= agrees.mean().clamp_min(1e-3)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(first * agrees / (1 - beta1 ** state["step"]) / size * group["lr"])


class AtOnce(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), for all tensors in one go or one by one."""

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, *, foreach: bool = True
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99), "foreach": foreach}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                self.state[param].setdefault("momentum", torch.zeros_like(param))
            for some in [params] if group["foreach"] else [[param] for param in params]:
                if some:
                    self._update(some, group)

    def _update(self, params: list[torch.Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grads = [param.grad for param in params]
        buffers = [self.state[param]["momentum"] for param in params]
        updates = torch._foreach_lerp(buffers, grads, 1 - beta1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(updates, group["lr"])
        torch._foreach_mul_(params, 1 - float(group["lr"]) * group["weight_decay"])
        torch._foreach_sub_(params, updates)
        torch._foreach_lerp_(buffers, grads, 1 - beta2)


class Scratch(ByParameter):
    """Keeps memory to compute in, one tensor for each shape; what it holds means nothing after the step."""

    SETTINGS: ClassVar[dict[str, Any]] = {"beta": 0.9}

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.scratch: dict[torch.Size, torch.Tensor] = {}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(param))
        momentum.lerp_(param.grad, 1 - group["beta"])
        room = self.scratch.setdefault(param.shape, torch.empty_like(param))
        torch.tanh(momentum * 50, out=room)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(room.mul_(group["lr"]))


class SignSGD(ByParameter):
    """Remembers nothing (Bernstein et al., 2018)."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(param.grad.sign() * group["lr"])


class Adagrad(ByParameter):
    """Divides by the sum of all squares (Duchi et al., 2011)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"eps": 1e-6, "gain": 10.0}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        total = state.setdefault("total", torch.zeros_like(param)).addcmul_(param.grad, param.grad)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(param.grad / (total.sqrt() + group["eps"]) * (group["gain"] * group["lr"]))


class Blocks(ByParameter):
    """Divides the momentum by its mean size in blocks of 64 elements."""

    SETTINGS: ClassVar[dict[str, Any]] = {"beta": 0.9}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 1 - group["beta"])
        flat = momentum.reshape(-1)
        sizes = [block.abs().mean().clamp_min(1e-12).expand(len(block)) for block in flat.split(64)]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((flat / torch.cat(sizes)).view(param.shape) * group["lr"])


class Yogi(ByParameter):
    """Adam whose second moment moves by steps of one size (Zaheer et al., 2018)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.99), "eps": 1e-3}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state.update(step=0, first=torch.zeros_like(param), second=torch.full_like(param, 1e-6))
        state["step"] += 1
        square = param.grad * param.grad
        first = state["first"].lerp_(param.grad, 1 - beta1)
        second = state["second"]
        second.sub_((second - square).sign() * square * (1 - beta2))
        size = (second / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(first / (1 - beta1 ** state["step"]) / size * group["lr"])


@frozen
class Ways:
    """How Lion is computed."""

    foreach: bool = field(default=True, validator=boolean(), metadata={"help": "step all tensors in one go"})


ENTRIES: dict[str, Callable[[], OptimizerEntry]] = {
    "lars": lambda: OptimizerEntry(Lars, granularity="tensor"),
    "amsgrad": lambda: OptimizerEntry(AMSGrad, same_as="torch.optim:AdamW"),
    "centered_rmsprop": lambda: OptimizerEntry(CenteredRMSprop),
    "cautious": lambda: OptimizerEntry(Cautious, granularity="tensor"),
    "lion_at_once": lambda: OptimizerEntry(AtOnce, settings=Ways, setting_prefixes=("at_once",)),
    "scratch": lambda: OptimizerEntry(Scratch),
    "sign_sgd": lambda: OptimizerEntry(SignSGD),
    "adagrad": lambda: OptimizerEntry(Adagrad),
    "blocks": lambda: OptimizerEntry(Blocks, alignment=64),
    "yogi": lambda: OptimizerEntry(Yogi),
}
"""Name to entry."""
