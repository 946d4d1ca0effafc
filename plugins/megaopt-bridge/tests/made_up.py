"""Optimizer classes of somebody else's, each with one property that a trial has to find out."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


class Plain(Optimizer):
    """Momentum, element by element."""

    def __init__(self, params: ParamsT, lr: float = 1e-2, beta: float = 0.9, mode: str = "plain") -> None:
        super().__init__(params, {"lr": lr, "beta": beta})
        self.mode = mode

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(param)
                state["step"] += 1
                state["momentum"].mul_(group["beta"]).add_(param.grad)
                param.sub_(self.scaled(state["momentum"], state["step"], group), alpha=group["lr"])

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Return the update; with mode "norm" divided by its norm."""
        return update / (update.norm() + 1e-6) if self.mode == "norm" else update


class Normed(Plain):
    """Divides by the norm of the tensor."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Divide."""
        return update / (update.norm() + 1e-6)


class LateNormed(Plain):
    """Divides by the norm from its twentieth step on."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Divide, later."""
        return update / (update.norm() + 1e-6) if step >= 20 else update


class OfTheGroup(Plain):
    """Divides by the norm of all gradients of the group."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Divide."""
        total = torch.stack([param.grad.norm() for param in group["params"]]).norm()
        return update / (total + 1e-6)


class OfAllGroups(Plain):
    """Divides by the norm of all gradients of all groups."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Divide."""
        params = [param for group in self.param_groups for param in group["params"]]
        return update / (torch.stack([param.grad.norm() for param in params]).norm() + 1e-6)


class Noisy(Plain):
    """Adds noise of its own generator."""

    noise = torch.Generator().manual_seed(0)

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Add noise."""
        return update + torch.randn(update.shape, generator=self.noise)


class Blockwise(Plain):
    """Rounds in blocks of 256 elements, as quantized states do."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Round each block by its largest value."""
        flat = update.reshape(-1)
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % 256)).view(-1, 256)
        scale = padded.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        return (torch.round(padded / scale) * scale).view(-1)[: len(flat)].view_as(update)


class Matrices(Plain):
    """Takes matrices only."""

    def scaled(self, update: torch.Tensor, step: int, group: Mapping[str, Any]) -> torch.Tensor:
        """Refuse what has not two dimensions."""
        if update.dim() != 2:
            raise ValueError("a matrix, please")
        return update / (update.norm() + 1e-6)


class CountsInGroups(Optimizer):
    """Makes a count in every group in its first step."""

    def __init__(self, params: ParamsT, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        """Take one step that shrinks with the count."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["step"])


class LooksForItsCount(CountsInGroups):
    """Begins otherwise where the count is already there."""

    @torch.no_grad()
    def step(self) -> None:
        """Take a first step that is larger."""
        if "step" not in self.param_groups[0]:
            for group in self.param_groups:
                for param in group["params"]:
                    param.sub_(param.grad)
        super().step()


class NeedsItsModel(Plain):
    """Cannot be made without a model."""

    def __init__(self, params: ParamsT, model: object, lr: float = 1e-2) -> None:
        super().__init__(params, lr)


class NeedsAClosure(Plain):
    """Evaluates the model itself."""

    def step(self, closure: Callable[[], float]) -> None:
        """Take a step."""
        closure()
        super().step()


class Fails(Plain):
    """Does not work."""

    def step(self) -> None:
        """Fail."""
        raise RuntimeError("out of order")
