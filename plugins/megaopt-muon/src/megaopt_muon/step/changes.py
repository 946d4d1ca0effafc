"""What a step subtracts from parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_muon.step.elementwise import subtract

if TYPE_CHECKING:
    from megaopt_core.params import MatrixWindow
    from megaopt_muon.products.workspace import Workspace
    from megaopt_muon.step.elementwise import Decay

__all__ = ["Change"]


@frozen(eq=False)
class Change:
    """What is subtracted from a parameter, or from one of its matrices, times the learning rate: `scale * values`.

    Args:
        index: which of the parameters.
        piece: which of its matrices; None for all of it.
        values: of the shape of the piece's window, or of the parameter.
        scale: the factor.
    """

    index: int
    piece: MatrixWindow | None
    values: torch.Tensor
    scale: float = 1.0

    def apply(
        self, param: torch.Tensor, lr: float | torch.Tensor, workspace: Workspace, decay: Decay | None
    ) -> None:
        """Subtract it, times the learning rate, element by element.

        Args:
            param: the parameter.
            lr: learning rate.
            workspace: where intermediate values live.
            decay: weight decay that comes before; None for none.
        """
        target = param if self.piece is None else self.piece.window(param)
        subtract(target, self.values, lr, self.scale, workspace, decay=decay)
