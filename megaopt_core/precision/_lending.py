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

    _borrowers: list[torch.Tensor] = field(factory=list)

    def lend(self, pieces: Sequence[Piece], stepped: Sequence[torch.Tensor]) -> None:
        """Give every stepped tensor its piece's gradient, in its own dtype.

        Args:
            pieces: the pieces, whose gradients were collected.
            stepped: the tensor that is stepped for each.
        """
        narrow: list[torch.Tensor] = []
        wide: list[torch.Tensor] = []
        for piece, tensor in zip(pieces, stepped, strict=True):
            grad = piece.grad
            if tensor is piece.param and grad is tensor.grad:
                continue
            if grad is not None and grad.dtype != tensor.dtype:
                if grad.is_sparse:
                    grad = grad.to(tensor.dtype)
                else:
                    narrow.append(grad)
                    grad = torch.empty_like(grad, dtype=tensor.dtype)
                    wide.append(grad)
            tensor.grad = grad
            self._borrowers.append(tensor)
        if narrow:
            torch._foreach_copy_(wide, narrow)

    def take_back(self) -> None:
        """Drop every gradient that was lent."""
        for tensor in self._borrowers:
            tensor.grad = None
        self._borrowers.clear()
