"""The policy of full precision: parameters are stepped where they are."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from attrs import define, field

from megaopt_core.optimizers.lending import GradLending, PlainState
from megaopt_core.sharding.base import Piece

__all__ = ["Fp32"]


@define
class Fp32(PlainState):
    """Parameters are stepped in place, in their own dtype."""

    is_mixed: bool = field(default=False, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _stepped: list[torch.Tensor] = field(factory=list, init=False)
    _watched: list[list[torch.Tensor]] = field(factory=list, init=False)
    _lending: GradLending = field(factory=GradLending, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the pieces' own tensors.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        self._pieces = pieces
        self._stepped = [piece.param for piece in pieces]
        self._watched = [[tensor] for tensor in self._stepped]
        return list(self._stepped)

    def grad(self, index: int) -> torch.Tensor | None:
        """Return the gradient of a stepped tensor.

        Args:
            index: position of the piece.
        """
        return self._stepped[index].grad

    def batches(self, inner: torch.optim.Optimizer, *, store_all: bool = False) -> Generator[None]:
        """Hand over once: everything is stepped together.

        Args:
            inner: not used.
            store_all: not used.
        """
        yield

    def watched(self) -> list[list[torch.Tensor]]:
        """Return the stepped tensors."""
        return self._watched

    def load_grads(self) -> None:
        """Lend each tensor its gradient where it is not its own already."""
        self._lending.lend(self._pieces, self._stepped)

    def write_back(self, indices: Sequence[int]) -> None:
        """Nothing to do: there is one copy.

        Args:
            indices: not used.
        """

    def discard_grads(self) -> None:
        """Take lent gradients back, so that backward does not add to them."""
        self._lending.take_back()

    def reload_model_params(self) -> None:
        """Nothing to do: there is one copy."""

    def extra_keys(self, index: int) -> tuple[str, ...]:
        """Return nothing: the parameter itself is the only copy.

        Args:
            index: position of the piece.
        """
        return ()

    def extra_state(self, index: int) -> dict[str, torch.Tensor]:
        """Return nothing.

        Args:
            index: position of the piece.
        """
        return {}

    def set_extra_state(self, index: int, key: str, value: torch.Tensor) -> None:
        """Ignore a main value: the model's checkpoint holds the parameter.

        Args:
            index: not used.
            key: not used.
            value: not used.
        """
