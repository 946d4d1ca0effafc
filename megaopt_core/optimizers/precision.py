"""Precision policies: which tensor the inner optimizer steps, and how it meets the model's parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from attrs import define, field

from megaopt_core.sharding.base import Piece

__all__ = ["Fp32", "MainParams", "PrecisionPolicy"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)


class PrecisionPolicy(Protocol):
    """What stands between a piece of the model and the tensor that is stepped."""

    @property
    def is_mixed(self) -> bool:
        """True when non-finite gradients skip the step."""

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the tensor to step for every piece, in order.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """

    def load_grads(self) -> None:
        """Give every stepped tensor the gradient that its piece collected."""

    def write_back(self) -> None:
        """Bring stepped values into the pieces; drop what only the step needed."""

    def discard_grads(self) -> None:
        """Drop this step's gradients without stepping."""

    def reload_model_params(self) -> None:
        """Take the pieces' present values over into the stepped tensors."""

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return state of one piece that the policy owns (`main_param`), by key.

        Args:
            index: position of the piece.
        """


def _as(grad: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return grad if grad is None or grad.dtype == dtype else grad.to(dtype)


@define
class _Lending:
    """Gives stepped tensors gradients for the time of a step, and takes them back."""

    _borrowers: list[torch.Tensor] = field(factory=list)

    def lend(self, pieces: Sequence[Piece], stepped: Sequence[torch.Tensor]) -> None:
        for piece, tensor in zip(pieces, stepped, strict=True):
            if tensor is piece.param and piece.grad is tensor.grad:
                continue
            tensor.grad = _as(piece.grad, tensor.dtype)
            self._borrowers.append(tensor)

    def take_back(self) -> None:
        for tensor in self._borrowers:
            tensor.grad = None
        self._borrowers.clear()


@define
class Fp32:
    """Parameters are stepped in place, in their own dtype."""

    is_mixed: bool = field(default=False, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _lending: _Lending = field(factory=_Lending, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the pieces' own tensors.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        self._pieces = pieces
        return [piece.param for piece in pieces]

    def load_grads(self) -> None:
        """Lend each tensor its gradient where it is not its own already."""
        self._lending.lend(self._pieces, [piece.param for piece in self._pieces])

    def write_back(self) -> None:
        """Take lent gradients back, so that backward does not add to them."""
        self._lending.take_back()

    def discard_grads(self) -> None:
        """Take lent gradients back without stepping."""
        self._lending.take_back()

    def reload_model_params(self) -> None:
        """Nothing to do: there is one copy."""

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return nothing.

        Args:
            index: position of the piece.
        """
        return {}


@define
class MainParams:
    """An fp32 main copy of every fp16 or bf16 piece is stepped; fp32 pieces are stepped in place.

    Args:
        main_dtype: dtype of the main copies.
    """

    main_dtype: torch.dtype = torch.float32
    is_mixed: bool = field(default=True, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _stepped: list[torch.Tensor] = field(factory=list, init=False)
    _models: list[torch.Tensor] = field(factory=list, init=False)
    _mains: list[torch.Tensor] = field(factory=list, init=False)
    _lending: _Lending = field(factory=_Lending, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return main copies, made now.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        self._pieces = pieces
        for piece in pieces:
            stepped = piece.param
            if piece.param.dtype in _LOW_PRECISION:
                stepped = torch.nn.Parameter(piece.param.detach().to(self.main_dtype, copy=True))
                self._models.append(piece.param)
                self._mains.append(stepped)
            self._stepped.append(stepped)
        return self._stepped

    def load_grads(self) -> None:
        """Cast every collected gradient to the main copy's dtype."""
        self._lending.lend(self._pieces, self._stepped)

    def write_back(self) -> None:
        """Round the main copies into the model's parameters and drop the main gradients."""
        if self._mains:
            torch._foreach_copy_(self._models, self._mains)
        self._lending.take_back()

    def discard_grads(self) -> None:
        """Drop the main gradients without stepping."""
        self._lending.take_back()

    def reload_model_params(self) -> None:
        """Copy the model's parameters into the main copies."""
        if self._mains:
            with torch.no_grad():
                torch._foreach_copy_(self._mains, self._models)

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return the main copy, where there is one.

        Args:
            index: position of the piece.
        """
        stepped = self._stepped[index]
        return {} if stepped is self._pieces[index].param else {"main_param": stepped}
