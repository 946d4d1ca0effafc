"""What a step subtracts from parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_muon.step.elementwise import subtract

if TYPE_CHECKING:
    from megaopt_core.params import MatrixWindow
    from megaopt_muon.products.workspace import Workspace
    from megaopt_muon.step.elementwise import Decay

__all__ = ["Change", "applied_together"]


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


def applied_together(
    changes: Iterable[Change],
    params: Sequence[torch.Tensor],
    lr: float,
    decays: Mapping[torch.dtype, Decay | None],
) -> list[Change]:
    """Apply with a few calls what an accelerator can so, and return the rest: `p <- keep p - (lr scale) values`.

    Their memory must be valid together, as that of an accelerator is.

    Args:
        changes: of any of the parameters.
        params: the parameters.
        lr: learning rate.
        decays: weight decay by a parameter's dtype.
    """
    rest: list[Change] = []
    together: dict[tuple[float, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for change in changes:
        param = params[change.index]
        decay = decays[param.dtype]
        plain = decay is None or not (decay.is_cautious or isinstance(decay.keep, torch.Tensor))
        if change.piece is None or param.dtype is not torch.float32 or not plain:
            rest.append(change)
            continue
        targets, values = together.setdefault((change.scale, change.values.dtype), ([], []))
        targets.append(change.piece.window(param))
        values.append(change.values)
    decay = decays.get(torch.float32)
    for (scale, _), (targets, values) in together.items():
        if decay is not None:
            torch._foreach_mul_(targets, decay.keep)
        torch._foreach_add_(targets, values, alpha=-lr * scale)
    return rest
