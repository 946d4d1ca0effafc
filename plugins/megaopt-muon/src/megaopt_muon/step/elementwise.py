"""What Muon does to every element before and after it orthogonalizes: in pieces that stay in the cache of a core."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

from megaopt_muon.products.precision import at_least_float32

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["Decay", "MomentumStep", "squared_norm", "subtract"]

_IN_CACHE: Final = 1 << 17
"""Elements of a piece."""


@frozen
class Decay:
    """Decoupled weight decay, made where the parameter is read for its update anyway.

    Args:
        keep: factor on the parameter.
        is_cautious: only on what agrees with its update in sign.
    """

    keep: float | torch.Tensor
    is_cautious: bool = False

    def apply(self, part: torch.Tensor, update: torch.Tensor) -> None:
        """Shrink a part of a parameter in place.

        Args:
            part: the part.
            update: what will be subtracted, but for a positive factor.
        """
        if self.is_cautious:  # the sign, so that no product becomes 0 because it is small
            part.copy_(torch.where(torch.sign(update) * part >= 0, part * self.keep, part))
        else:
            part.mul_(self.keep)


def squared_norm(x: torch.Tensor) -> float:
    """Return the squared Frobenius norm, added up in pieces: the same number that :class:`MomentumStep` finds.

    Args:
        x: float32, contiguous.
    """
    return sum(float(torch.dot(piece, piece)) for piece in x.view(-1).split(_IN_CACHE))


class MomentumStep:
    """The momentum of one parameter in one sweep, whose update is written in the dtype it is needed in.

    The numbers are those of the same operations on whole tensors, bit for bit.

    Args:
        momentum: decay rate of the momentum.
        added_decay: the multiple of the parameter that is added to the gradient.
        nesterov: look one step of momentum ahead.
        workspace: where pieces live.
    """

    def __init__(
        self,
        *,
        momentum: float,
        added_decay: float,
        nesterov: bool,
        workspace: Workspace,
    ) -> None:
        self._add = added_decay
        self._momentum = momentum
        self._nesterov = nesterov
        self._workspace = workspace

    def __call__(
        self, param: torch.Tensor, grad: torch.Tensor, buffer: torch.Tensor, out: torch.Tensor
    ) -> float:
        """Move the momentum, write what is to be orthogonalized, and return its squared Frobenius norm.

        Args:
            param: contiguous.
            grad: of the same shape and dtype, contiguous.
            buffer: its momentum, likewise.
            out: where the update goes, of the same shape and any floating-point dtype.
        """
        flat = [tensor.view(-1) for tensor in (param, grad, buffer, out)]
        length = min(_IN_CACHE, param.numel())
        spare = self._workspace.take("elements", (2, length), param.dtype, param.device, dense=True)
        square = 0.0
        whole = length == param.numel()
        for p, g, m, u in [flat] if whole else zip(*(tensor.split(length) for tensor in flat), strict=True):
            source = torch.add(g, p, alpha=self._add, out=spare[1, : g.numel()]) if self._add else g
            m.lerp_(source, 1.0 - self._momentum)
            ahead = torch.lerp(source, m, self._momentum, out=spare[0, : g.numel()]) if self._nesterov else m
            square += float(torch.dot(ahead, ahead))
            u.copy_(ahead)
        return square


def subtract(
    target: torch.Tensor,
    update: torch.Tensor,
    lr: float | torch.Tensor,
    scale: float,
    workspace: Workspace,
    *,
    decay: Decay | None = None,
) -> None:
    """Apply `target -= lr * (scale * update)`, where the products are float32 or wider.

    Args:
        target: of any strides.
        update: of the same shape and any floating-point dtype.
        lr: learning rate.
        scale: factor on the update.
        workspace: where pieces live.
        decay: weight decay, which comes before; None for none.
    """
    dtype = at_least_float32(target.dtype)  # bfloat16 would round the learning rate too
    as_it_is = update.dtype is dtype and scale == 1.0 and not isinstance(lr, torch.Tensor)
    for part, change in _rows(target, update):
        wide = change
        if not as_it_is:
            wide = workspace.take("change", change.shape, dtype, target.device, dense=True)
            if change.dtype is dtype:
                torch.mul(change, scale, out=wide)
            else:
                wide.copy_(change)
                if scale != 1.0:
                    wide.mul_(scale)
        if decay is not None:
            decay.apply(part, wide)
        if isinstance(lr, torch.Tensor):
            part.sub_(wide.mul_(lr))
        else:
            part.add_(wide, alpha=-lr)


def _rows(target: torch.Tensor, update: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Cut both along their first dimension into pieces; an accelerator takes all at once."""
    if target.numel() <= _IN_CACHE or target.device.type != "cpu":
        return ((target, update),)
    height = max(1, _IN_CACHE // (target.numel() // target.shape[0]))
    return zip(target.split(height), update.split(height), strict=True)
