"""Precision policies: which tensor the inner optimizer steps, and how it meets the model's parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from attrs import define, field

from megaopt_core.sharding.base import Piece

__all__ = ["LOW_PRECISION", "Fp32", "MainParams", "PrecisionPolicy"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


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

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient that a piece will be stepped with; it may be changed in place.

        Args:
            index: position of the piece.
        """

    def batches(self, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Hand over once for each batch of tensors that `inner` is to step; most policies hand over once.

        Args:
            inner: the optimizer that holds the stepped tensors.
        """

    def write_back(self) -> None:
        """Bring stepped values into the pieces; drop what only the step needed."""

    def discard_grads(self) -> None:
        """Drop this step's gradients without stepping."""

    def reload_model_params(self) -> None:
        """Take the pieces' present values over into the stepped tensors."""

    def watched(self) -> list[list[torch.Tensor]]:
        """Return for each piece the tensors in which a change shows."""

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return state of one piece that the policy owns (`main_param`), by key.

        Args:
            index: position of the piece.
        """

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Take over a value that :meth:`extra_state` returned; keys that the policy does not keep are left alone.

        Args:
            index: position of the piece.
            key: its key.
            value: its value.
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

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient of a stepped tensor.

        Args:
            index: position of the piece.
        """
        return self._pieces[index].param.grad

    def batches(self, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Hand over once: everything is stepped together.

        Args:
            inner: not used.
        """
        yield

    def watched(self) -> list[list[torch.Tensor]]:
        """Return the stepped tensors."""
        return [[tensor] for tensor in (piece.param for piece in self._pieces)]

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

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Ignore a main value: the parameter itself is the only copy, and the model's checkpoint holds it.

        Args:
            index: not used.
            key: not used.
            value: not used.
        """


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
            if piece.param.dtype in LOW_PRECISION:
                stepped = torch.nn.Parameter(piece.param.detach().to(self.main_dtype, copy=True))
                self._models.append(piece.param)
                self._mains.append(stepped)
            self._stepped.append(stepped)
        return self._stepped

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient of a stepped tensor.

        Args:
            index: position of the piece.
        """
        return self._stepped[index].grad

    def batches(self, inner: torch.optim.Optimizer) -> Iterator[None]:
        """Hand over once: everything is stepped together.

        Args:
            inner: not used.
        """
        yield

    def watched(self) -> list[list[torch.Tensor]]:
        """Return the stepped tensors."""
        return [[tensor] for tensor in self._stepped]

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

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Copy a main value into the main copy, where there is one.

        Args:
            index: position of the piece.
            key: `"main_param"`.
            value: of any floating dtype.
        """
        if key in self.extra_state(index):
            with torch.no_grad():
                self._stepped[index].copy_(value)
