"""Matrices whose scale is kept beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["Scaled", "has_more_rows", "squared_norm", "take"]

_IN_CACHE: Final = 1 << 17
"""Elements that are widened at a time: they stay in the cache of a core."""


@frozen(eq=False)
class Scaled:
    """`scale * values`.

    Args:
        values: a matrix, or a batch.
        scale: the factor.
    """

    values: torch.Tensor
    scale: float = 1.0

    def times(self, factor: float) -> Scaled:
        """Return it times a number, without a pass over the matrix.

        Args:
            factor: the number.
        """
        return Scaled(self.values, self.scale * factor)


def squared_norm(x: torch.Tensor, workspace: Workspace) -> float:
    """Return the squared Frobenius norm of a matrix of 16 bits, summed in more.

    Args:
        x: a contiguous tensor.
        workspace: where pieces of it are widened.
    """
    flat = x.view(-1)
    buffer = workspace.take("wide", (min(_IN_CACHE, flat.numel()),), torch.float32, x.device)
    total = 0.0
    for piece in flat.split(_IN_CACHE):
        wide = buffer[: piece.numel()].copy_(piece)
        total += float(torch.dot(wide, wide))
    return total


def take(name: str, like: torch.Tensor, workspace: Workspace, *, dense: bool = False) -> torch.Tensor:
    """Return memory for a matrix like another: rows an odd number of cache lines apart, batches without gaps.

    Args:
        name: which memory.
        like: tells shape, dtype and device.
        workspace: where it lies.
        dense: leave no gaps between rows.
    """
    dense = dense or like.dim() == 3
    return workspace.take(name, like.shape, like.dtype, like.device, dense=dense, odd_lines=True)


def has_more_rows(x: torch.Tensor) -> bool:
    """Return whether a matrix has more rows than columns.

    Args:
        x: `[*batch, rows, columns]`.
    """
    return x.shape[-2] > x.shape[-1]
