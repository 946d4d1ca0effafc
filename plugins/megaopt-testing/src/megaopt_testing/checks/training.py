"""Training: the loss falls, and in bf16 as in fp32 the same gradients make the same steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megaopt_core import MatrixView
from megaopt_core.errors import RoutingError, UnusedSettingWarning
from megaopt_testing.trial import Trial, some

__all__ = ["check_learns", "check_precision"]

_STEPS = 50
_FALL = 0.01
_POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("main parameters", {}),
    ("remainders", {"use_precision_aware_optimizer": True, "store_param_remainders": True}),
)


class _Quadratic(nn.Module):
    """`sum_ij l_i * w_ij^2 / 2` of a matrix, with curvatures `l_i` from 1 down to 1e-4."""

    curvature: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 8))
        self.weight.matrix_view = MatrixView()  # type: ignore[attr-defined] # nothing shows what it is
        self.register_buffer("curvature", torch.logspace(0, -4, 16).unsqueeze(1))

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = (self.curvature * self.weight.square()).sum() / 2
        return loss


class _Logistic(nn.Module):
    """Two classes of 64 points in 8 dimensions, which a plane separates but for noise."""

    points: torch.Tensor
    label: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.zeros(()))
        points = torch.randn(64, 8)
        self.register_buffer("points", points)
        side = points @ torch.randn(8) + 0.5 * torch.randn(64) + 0.3
        self.register_buffer("label", (side > 0).float())

    def forward(self) -> torch.Tensor:
        scores = self.points @ self.weight + self.bias
        return nn.functional.binary_cross_entropy_with_logits(scores, self.label)


_CONVEX: tuple[tuple[str, Callable[[], nn.Module], int, float], ...] = (
    ("a quadratic of condition 10,000", _Quadratic, 200, 0.95),
    ("logistic regression", _Logistic, 200, 0.95),
)
"""What is minimised, in how many steps, to which part of its first loss at most."""


def check_learns(optimizer: str, **settings: Any) -> None:
    """Fifty steps on one batch lower the loss of a small GPT by a hundredth; two convex losses fall by a twentieth.

    These are a quadratic of condition 10,000 and logistic regression, at 200 steps each. Losses stay finite.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; without `lr`, 0.01.

    Raises:
        ConformanceError: a loss does not fall, or is not finite.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    losses = [trial.train_step(model, built, 0) for _ in range(_STEPS)]
    _require_fall(trial, "a small GPT", losses[0], losses[-1], _STEPS, 1 - _FALL)
    for what, make, steps, part in _CONVEX:
        torch.manual_seed(0)
        problem = make()
        with warnings.catch_warnings():
            # A matrix optimizer leaves vectors to another one, and its settings with them.
            warnings.simplefilter("ignore", UnusedSettingWarning)
            try:
                built = trial.build(problem, weight_decay=0.0)
            except RoutingError:  # it steps matrices, and the problem has none
                continue
        first = problem().item()
        for _ in range(steps):
            built.zero_grad()
            problem().backward()
            built.step()
        _require_fall(trial, what, first, problem().item(), steps, part)


def _require_fall(trial: Trial, what: str, first: float, last: float, steps: int, part: float) -> None:
    if not last <= part * first:  # false for NaN, too
        trial.fail(
            f"{steps} steps reduce the loss of {what} from {first:.4f} to {last:.4f}; it must fall to {part:g} of the "
            "first at most. If its learning rates have another size, give the kit one: run_checks(name, lr=...)"
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
        model = trial.model()  # a deep copy would lose what attributes say of its parameters
        model.load_state_dict(rounded.state_dict())
        torch.manual_seed(0)
        in_bf16 = trial.build(rounded, bf16=True, **policy)
        torch.manual_seed(0)
        in_fp32 = trial.build(model)
        own = trial.own_names(in_fp32)
        for step in range(3):
            for trained, stepped in ((rounded, in_bf16), (model, in_fp32)):
                torch.manual_seed(step)
                trial.step_given(trained, stepped, step)
            low, high = dict(rounded.named_parameters()), dict(model.named_parameters())
            other = [name for name in own if not _is_rounded(low[name].detach(), high[name].detach())]
            if other:
                trial.fail(
                    f"step {step + 1} in bf16 with {what} differs from the step in fp32 with the same gradients: "
                    f"{some(other)}. The optimizer gets fp32 tensors in both; does it read the model instead?"
                )


def _is_rounded(low: torch.Tensor, high: torch.Tensor) -> bool:
    """Return whether every bf16 value is the one that is nearest to an fp32 value, or one of two that are."""
    nearest = high.to(torch.bfloat16)
    return torch.equal((low.double() - high.double()).abs(), (nearest.double() - high.double()).abs())
