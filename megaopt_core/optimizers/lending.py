"""What policies have in common: gradients that are lent for a step, and states that are kept as they are."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from attrs import define, field

from megaopt_core.sharding.base import Piece

__all__ = ["GradLending", "PlainState"]


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


class PlainState:
    """States are kept as the inner optimizer makes them."""

    def read_state(self, index: int, key: str, state: Mapping[str, Any]) -> Any:
        """Return the value as it is.

        Args:
            index: not used.
            key: its key.
            state: the inner optimizer's state of the piece.
        """
        return state[key]

    def write_state(self, index: int, key: str, state: MutableMapping[str, Any], value: Any) -> None:
        """Copy a tensor into the one that is there; put anything else in its place.

        Args:
            index: not used.
            key: its key.
            state: the inner optimizer's state of the piece.
            value: the new value.
        """
        present = state.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value.reshape(present.shape))
        else:
            state[key] = value

    def is_code(self, key: str) -> bool:
        """Return False: nothing is stored in a code.

        Args:
            key: not used.
        """
        return False
