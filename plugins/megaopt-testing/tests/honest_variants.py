"""More published optimizers as somebody else would write them: of other families than Adam, and a random one."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from megaopt_core import OptimizerEntry


class ByParameter(torch.optim.Optimizer):
    """Calls `update` for every parameter that has a gradient."""

    SETTINGS: ClassVar[dict[str, Any]] = {}

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **self.SETTINGS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group, self.state[param])


class Adan(ByParameter):
    """Momentum of differences of gradients beside that of gradients (Xie et al., 2022)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.98, 0.92, 0.99), "eps": 1e-8}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2, beta3 = group["betas"]
        if not state:
            zeros = {key: torch.zeros_like(param) for key in ("mean", "change", "square", "last")}
            state.update(step=0, **zeros)
        state["step"] += 1
        step, grad = state["step"], param.grad
        change = grad - state["last"] if step > 1 else torch.zeros_like(grad)
        state["last"].copy_(grad)
        mean = state["mean"].lerp_(grad, 1 - beta1) / (1 - beta1**step)
        drift = state["change"].lerp_(change, 1 - beta2) / (1 - beta2**step)
        ahead = grad + beta2 * change
        square = state["square"].mul_(beta3).addcmul_(ahead, ahead, value=1 - beta3) / (1 - beta3**step)
        param.sub_((mean + beta2 * drift) / (square.sqrt() + group["eps"]) * group["lr"])
        param.div_(1 + group["lr"] * group["weight_decay"])


class Adafactor(ByParameter):
    """Second moments of rows and columns only (Shazeer and Stern, 2018)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"power": 0.8, "clip": 1.0}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        square = param.grad.square() + 1e-30
        if not state:
            state["step"] = 0
            kept = {"row": square.mean(-1), "column": square.mean(-2)} if param.ndim > 1 else {"all": square}
            state.update({key: torch.zeros_like(value) for key, value in kept.items()})
        state["step"] += 1
        weight = state["step"] ** -group["power"]
        if param.ndim > 1:
            row, column = (
                state["row"].lerp_(square.mean(-1), weight),
                state["column"].lerp_(square.mean(-2), weight),
            )
            second = (row / row.mean(-1, keepdim=True)).unsqueeze(-1) * column.unsqueeze(-2)
        else:
            second = state["all"].lerp_(square, weight)
        update = param.grad * second.rsqrt()
        update = update / (update.square().mean().sqrt() / group["clip"]).clamp_min(1.0)
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_(update * group["lr"])


class Lamb(ByParameter):
    """Adam's step at the size of the weights (You et al., 2020)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.999), "eps": 1e-6}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state.update(step=0, mean=torch.zeros_like(param), square=torch.zeros_like(param))
        state["step"] += 1
        mean = state["mean"].lerp_(param.grad, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["square"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        update = mean / ((square / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
        update = update + group["weight_decay"] * param
        sizes = param.norm(), update.norm()
        trust = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], torch.ones_like(sizes[0]))
        param.sub_(update * (group["lr"] * trust))


class SophiaLike(ByParameter):
    """A clipped step by a diagonal curvature (Liu et al., 2023), estimated by squares of gradients."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.965, 0.99), "rho": 0.04}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        if not state:
            state.update(mean=torch.zeros_like(param), curvature=torch.zeros_like(param))
        mean = state["mean"].lerp_(param.grad, 1 - group["betas"][0])
        curvature = state["curvature"].lerp_(param.grad.square(), 1 - group["betas"][1])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((mean / (group["rho"] * curvature).clamp_min(1e-12)).clamp(-1, 1) * group["lr"])


class ShampooLike(ByParameter):
    """Inverse fourth roots of the sums of both Gram matrices (Gupta et al., 2018)."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        grad = param.grad.reshape(param.shape[0], -1) if param.ndim > 1 else param.grad.reshape(-1, 1)
        if not state:
            state.update(left=1e-4 * torch.eye(grad.shape[0]), right=1e-4 * torch.eye(grad.shape[1]))
        roots = [
            self._root(state["left"].add_(grad @ grad.T)),
            self._root(state["right"].add_(grad.T @ grad)),
        ]
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((roots[0] @ grad @ roots[1]).reshape(param.shape) * group["lr"])

    @staticmethod
    def _root(matrix: torch.Tensor) -> torch.Tensor:
        if not bool(matrix.isfinite().all()):
            return torch.full_like(matrix, math.nan)
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ torch.diag(values.clamp_min(1e-12) ** -0.25) @ vectors.T


class NesterovSGD(ByParameter):
    """Momentum that looks ahead, and weight decay as a part of the gradient."""

    SETTINGS: ClassVar[dict[str, Any]] = {"momentum": 0.9}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        grad = param.grad + group["weight_decay"] * param
        buffer = state.setdefault("buffer", torch.zeros_like(param)).mul_(group["momentum"]).add_(grad)
        param.sub_((grad + group["momentum"] * buffer) * group["lr"])


class Langevin(ByParameter):
    """Gradient descent with noise from torch's default generator, as Bayesian methods have it."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((2 * param.grad + 1e-3 * torch.randn_like(param)) * group["lr"])


class Fromage(ByParameter):
    """Keeps the size of the weights by dividing by a root of one and the squared rate (Bernstein et al., 2020)."""

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        rate, sizes = float(group["lr"]), (param.norm(), param.grad.norm())
        both = (sizes[0] > 0) & (sizes[1] > 0)
        step = torch.where(both, param.grad * (sizes[0] / sizes[1]), param.grad)
        param.sub_(step * rate + param * (rate * group["weight_decay"])).div_(math.sqrt(1 + rate**2))


class Projected(ByParameter):
    """Adam in a subspace of four directions, found anew every ten steps (GaLore, Zhao et al., 2024)."""

    SETTINGS: ClassVar[dict[str, Any]] = {"betas": (0.9, 0.99), "eps": 1e-8, "rank": 4, "every": 10}

    def update(self, param: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        grad, low = param.grad, param.ndim == 2 and min(param.shape) > group["rank"]
        if not state:
            shape = (group["rank"], param.shape[1]) if low else param.shape
            state.update(step=0, mean=torch.zeros(shape), square=torch.zeros(shape))
            state["basis"] = torch.zeros(param.shape[0], group["rank"]) if low else torch.zeros(())
        if low:
            if state["step"] % group["every"] == 0:
                state["basis"].copy_(self._directions(grad)[:, : group["rank"]])
            grad = state["basis"].T @ grad
        state["step"] += 1
        mean = state["mean"].lerp_(grad, 1 - beta1) / (1 - beta1 ** state["step"])
        square = state["square"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = mean / ((square / (1 - beta2 ** state["step"])).sqrt() + group["eps"])
        param.mul_(1 - group["lr"] * group["weight_decay"])
        param.sub_((state["basis"] @ update if low else update) * group["lr"])

    @staticmethod
    def _directions(grad: torch.Tensor) -> torch.Tensor:
        if not bool(grad.isfinite().all()):
            return torch.full((grad.shape[0], min(grad.shape)), math.nan)
        return torch.linalg.svd(grad, full_matrices=False)[0]


ENTRIES: dict[str, Callable[[], OptimizerEntry]] = {
    "adan": lambda: OptimizerEntry(Adan),
    "adafactor": lambda: OptimizerEntry(Adafactor, granularity="tensor"),
    "lamb": lambda: OptimizerEntry(Lamb, granularity="tensor"),
    "sophia_like": lambda: OptimizerEntry(SophiaLike),
    "shampoo_like": lambda: OptimizerEntry(ShampooLike, granularity="tensor"),
    "nesterov_sgd": lambda: OptimizerEntry(NesterovSGD),
    "fromage": lambda: OptimizerEntry(Fromage, granularity="tensor"),
    "projected": lambda: OptimizerEntry(Projected, granularity="tensor", same_as="torch.optim:AdamW"),
    "langevin": lambda: OptimizerEntry(Langevin, granularity="tensor"),
}
"""Name to entry."""
