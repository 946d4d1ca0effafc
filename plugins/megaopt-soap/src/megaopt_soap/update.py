"""SOAP's step of one matrix."""

from __future__ import annotations

from typing import Final

import torch
from attrs import frozen

from megaopt_soap.orthogonalization import orthogonalized
from megaopt_soap.precision import matmul_precision
from megaopt_soap.rotation import Rotation

__all__ = ["MatrixState", "StepSettings", "step_matrix"]

_BLOCK: Final = 1 << 16  # elements: a few blocks of float32 fit a core's own cache


@frozen
class StepSettings:
    """The numbers of one step.

    Args:
        step: its number, from 1 on.
        lr: learning rate.
        betas: decay rates of momentum and second moment.
        shampoo_beta: decay rate of the Kronecker factors.
        eps: keeps divisions finite.
        weight_decay: weight decay coefficient.
        frequency: number of steps from one refresh of the bases to the next.
        was_rotated: the momentum is stored in the bases.
        updates_first: the first gradient, which the bases come from, is also applied in them.
        scale: on an orthogonalized update, beside the root of its larger dimension; None: do not orthogonalize.
        cautious: decay only where update and weight agree in sign.
        max_rms: largest root mean square of an update, as a multiple of the learning rate; None: no bound.
    """

    step: int
    lr: float
    betas: tuple[float, float]
    shampoo_beta: float
    eps: float
    weight_decay: float
    frequency: int
    was_rotated: bool
    updates_first: bool = True
    scale: float | None = None
    cautious: bool = False
    max_rms: float | None = None

    @property
    def adam_step(self) -> int:
        """Number of the step for Adam's moments; 0 in a first step that applies nothing."""
        return self.step if self.updates_first else self.step - 1

    @property
    def factor_weight(self) -> float:
        """Share of this step's gradient in the Kronecker factors, so that they are averages from the first step on."""
        return (1.0 - self.shampoo_beta) / (1.0 - self.shampoo_beta**self.step)

    @property
    def refreshes(self) -> bool:
        """True when this step sets the bases anew."""
        return (self.step - 1) % self.frequency == 0

    @property
    def rotates_momentum(self) -> bool:
        """True when the momentum is to be stored in the bases.

        While they stay, that saves its rotation. Where they change with every step, the momentum is cheaper as it is.
        """
        return self.frequency > 1


@frozen(eq=False)
class MatrixState:
    """The state of one matrix; every tensor is updated in place.

    Args:
        exp_avg: momentum, `[rows, columns]`.
        exp_avg_sq: second moment in the bases, of the same shape.
        rotation: the bases.
    """

    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    rotation: Rotation


def step_matrix(
    target: torch.Tensor, grad: torch.Tensor, state: MatrixState, settings: StepSettings
) -> torch.Tensor | None:
    """Update one matrix and its state in place.

    Args:
        target: the matrix, `[rows, columns]`.
        grad: its gradient, of the state's dtype.
        state: its state.
        settings: the numbers of this step.

    Returns:
        The root mean square of the update as a multiple of the learning rate, on the device; None where none is made.
    """
    rotation, exp_avg = state.rotation, state.exp_avg
    rotated = _rotated_gradient(grad, state, settings)
    if settings.adam_step == 0:
        return None
    weight = 1.0 - settings.betas[0]
    momentum, share = exp_avg, None
    if settings.adam_step == 1:
        exp_avg.lerp_(rotated if settings.rotates_momentum else grad, weight)
        # Where the gradient has no part, its quotient with itself must not become one of two roundings.
        momentum = rotated * weight
    elif settings.rotates_momentum:
        share = weight
    else:
        momentum = rotation.apply(exp_avg.lerp_(grad, weight))
    rotated = rotated.clone() if rotated is grad else rotated  # without any basis; it is written over
    return _apply(
        target, _direction(momentum, state.exp_avg_sq, rotated, settings, share), rotation, settings
    )


def _rotated_gradient(grad: torch.Tensor, state: MatrixState, settings: StepSettings) -> torch.Tensor:
    """Bring factors, bases and what is stored in them up to date, and return the gradient in the bases."""
    rotation, exp_avg = state.rotation, state.exp_avg
    refreshes, to_bases = settings.refreshes, settings.rotates_momentum
    rotated = rotation.accumulate(
        grad, settings.factor_weight, settings.eps, plain=settings.adam_step == 0, rotate=not refreshes
    )
    if settings.was_rotated and (refreshes or not to_bases):
        exp_avg.copy_(rotation.undo(exp_avg))
    if rotated is None:
        with matmul_precision("highest"):  # what is lost here is lost in every step until the next refresh
            rotation.refresh(state.exp_avg_sq, first=settings.step == 1)
        rotated = rotation.apply(grad)
    if to_bases and (refreshes or not settings.was_rotated):
        exp_avg.copy_(rotation.apply(exp_avg))
    return rotated


def _apply(
    target: torch.Tensor, direction: torch.Tensor, rotation: Rotation, settings: StepSettings
) -> torch.Tensor:
    """Update the matrix, and return the root mean square of the update as a multiple of the learning rate."""
    keep = 1.0 - settings.lr * settings.weight_decay
    is_rotated = settings.scale is None
    if settings.scale is None:
        corrections = [1.0 - beta**settings.adam_step for beta in settings.betas]
        scale = corrections[1] ** 0.5 / corrections[0]
    else:
        direction = orthogonalized(rotation.undo(direction))
        scale = settings.scale * max(target.shape) ** 0.5
    # Rotations keep it.
    rms: torch.Tensor = torch.linalg.vector_norm(direction) * (scale / direction.numel() ** 0.5)
    if settings.max_rms is not None:
        direction.mul_((settings.max_rms / rms).clamp_(max=1.0))
        rms = rms.clamp(max=settings.max_rms)
    if is_rotated and not settings.cautious:
        rotation.undo_into(target, direction, keep=keep, alpha=-settings.lr * scale)
        return rms
    change = rotation.undo(direction) if is_rotated else direction
    _decay(target, change, keep, cautious=settings.cautious)
    target.add_(change.to(target.dtype), alpha=-settings.lr * scale)
    return rms


def _decay(target: torch.Tensor, update: torch.Tensor, keep: float, *, cautious: bool) -> None:
    if cautious:  # the sign, so that no product becomes 0 because it is small
        target.copy_(torch.where(torch.sign(update) * target >= 0, target * keep, target))
    else:
        target.mul_(keep)


def _direction(
    momentum: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    settings: StepSettings,
    share: float | None,
) -> torch.Tensor:
    """Update the moments and return, in the memory of the gradient, what Adam makes of them, but for a factor.

    On a CPU block by block, so that blocks stay in the cache between operations.

    Args:
        momentum: the first moment.
        exp_avg_sq: the second one.
        grad: the gradient in the bases, which nobody reads afterwards.
        settings: the numbers of this step.
        share: of the gradient in the momentum; None: it is there already.
    """
    beta2 = settings.betas[1]
    eps = settings.eps * (1.0 - beta2**settings.adam_step) ** 0.5
    grad = grad.contiguous()
    size = _BLOCK if exp_avg_sq.device.type == "cpu" else max(1, exp_avg_sq.numel())
    flat = (tensor.view(-1).split(size) for tensor in (momentum.contiguous(), exp_avg_sq, grad))
    for m, v, g in zip(*flat, strict=True):
        if share is not None:
            m.lerp_(g, share)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        torch.sqrt(v, out=g)
        torch.div(m, g.add_(eps), out=g)
    return grad
