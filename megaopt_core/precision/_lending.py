"""Gradients that stepped tensors have for the time of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from megaopt_core.sharding._live_model import Piece

__all__ = ["GradLending"]


@define
class GradLending:
    """Gives stepped tensors gradients for the time of a step, and takes them back."""

    _borrowers: list[tuple[torch.Tensor, torch.Tensor | None]] = field(factory=list)
    """What was lent to, and the gradient that it had before."""

    def lend(self, pieces: Sequence[Piece], stepped: Sequence[torch.Tensor]) -> None:
        """Give every stepped tensor its piece's gradient, in its own dtype and order in memory.

        Torch's fused kernels go through parameter and gradient as they lie in memory, whatever their strides are.

        Args:
            pieces: the pieces, whose gradients were collected.
            stepped: the tensor that is stepped for each.
        """
        other: list[torch.Tensor] = []
        like: list[torch.Tensor] = []
        for piece, tensor in zip(pieces, stepped, strict=True):
            grad = piece.grad
            own = grad if tensor is piece.param and grad is tensor.grad else None
            if grad is not None and grad.is_sparse:
                grad = grad.to(tensor.dtype)
            elif grad is not None and (grad.dtype != tensor.dtype or grad.stride() != tensor.stride()):
                other.append(grad)
                grad = torch.empty_like(tensor)
                like.append(grad)
            if grad is own and grad is tensor.grad:
                continue
            tensor.grad = grad
            self._borrowers.append((tensor, own))
        if other:
            torch._foreach_copy_(like, other)

    def take_back(self) -> None:
        """Take every gradient back that was lent."""
        for tensor, own in self._borrowers:
            tensor.grad = own
        self._borrowers.clear()
