"""The policy of full precision: parameters are stepped where they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, field

from megaopt_core.precision._base_policy import BasePrecisionPolicy
from megaopt_core.precision._lending import GradLending
from megaopt_core.sharding._live_model import Piece

__all__ = ["Fp32"]


@define
class Fp32(BasePrecisionPolicy):
    """Parameters are stepped in place, in their own dtype."""

    is_mixed: bool = field(default=False, init=False)
    _pieces: Sequence[Piece] = field(factory=list, init=False)
    _stepped: Sequence[torch.Tensor] = field(factory=list, init=False)
    _watched: list[list[torch.Tensor]] = field(factory=list, init=False)
    _lending: GradLending = field(factory=GradLending, init=False)

    def attach(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the pieces' own tensors.

        Args:
            pieces: this rank's pieces of one inner optimizer.
        """
        stepped = super().attach(pieces)
        self._watched = super().watched()
        return stepped

    def extend(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Return the pieces' own tensors.

        Args:
            pieces: pieces that this rank steps from now on.
        """
        added = super().extend(pieces)
        self._watched = super().watched()
        return added

    def replace(self, index: int, old: torch.Tensor) -> torch.Tensor:
        """Return the piece's own tensor.

        Args:
            index: position of the piece.
            old: what its `param` was.
        """
        stepped = super().replace(index, old)
        self._watched = super().watched()
        return stepped

    def watched(self) -> list[list[torch.Tensor]]:
        """Return the stepped tensors: the same lists in every step."""
        return self._watched
