"""Matrices whose scale is kept beside them, and what is multiplied of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

if TYPE_CHECKING:
    from megaopt_muon.workspace import Workspace

__all__ = ["Scaled", "has_more_rows", "outer", "squared_norm", "take"]

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


def outer(x: torch.Tensor, factor: float, workspace: Workspace, *, tall: bool) -> torch.Tensor:
    """Return `factor * X X^T`, or `factor * X^T X` for a tall matrix, rounded once.

    Args:
        x: `[n, k]` or `[matrices, n, k]`.
        factor: on the product.
        workspace: where the result lies.
        tall: take the product over the rows.
    """
    size = x.shape[-1] if tall else x.shape[-2]
    out = workspace.take("gram", (*x.shape[:-2], size, size), x.dtype, x.device, dense=True)
    left, right = (x.mT, x) if tall else (x, x.mT)
    if factor == 1.0:
        return torch.matmul(left, right, out=out)
    multiply = torch.baddbmm if x.dim() == 3 else torch.addmm
    return multiply(out, left, right, beta=0, alpha=factor, out=out)


def take(name: str, like: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    """Return memory for a matrix like another, without gaps.

    Args:
        name: which memory.
        like: tells shape, dtype and device.
        workspace: where it lies.
    """
    return workspace.take(name, like.shape, like.dtype, like.device, dense=True)


def has_more_rows(x: torch.Tensor) -> bool:
    """Return whether a matrix has more rows than columns.

    Args:
        x: `[*batch, rows, columns]`.
    """
    return x.shape[-2] > x.shape[-1]
