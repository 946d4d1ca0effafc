"""Matrices whose scale is kept beside them, and what is multiplied of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["Scaled", "has_more_rows", "outer", "outer_memory", "product", "squared_norm", "take"]

_IN_CACHE: Final = 1 << 17
"""Elements that are widened at a time: they stay in the cache of a core."""

_BLOCK: Final = 256
"""Rows of a block of symmetric products, about."""

_TALL: Final = 512
"""Rows from which on `X^T X` of a matrix at least twice as long as wide is made by blocks."""

_WIDE: Final = 640
"""The same of `X X^T`."""

_LARGE: Final = 1536
"""The same of any symmetric product."""


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


def outer_memory(x: torch.Tensor, workspace: Workspace, *, tall: bool) -> torch.Tensor:
    """Return memory for what :func:`outer` makes.

    Args:
        x: `[n, k]` or `[matrices, n, k]`.
        workspace: where it lies.
        tall: the product is over the rows.
    """
    size = x.shape[-1] if tall else x.shape[-2]
    shape = (*x.shape[:-2], size, size)
    return workspace.take("gram", shape, x.dtype, x.device, dense=x.dim() == 3, odd_lines=True)


def outer(x: torch.Tensor, factor: float, out: torch.Tensor, *, tall: bool) -> None:
    """Make `factor * X X^T`, or `factor * X^T X` for a tall matrix, rounded once.

    Of a large one, block rows are multiplied right of the diagonal only, and copied below it.

    Args:
        x: `[n, k]` or `[matrices, n, k]`.
        factor: on the product.
        out: where it goes.
        tall: take the product over the rows.
    """
    left, right = (x.mT, x) if tall else (x, x.mT)
    size = out.shape[-1]
    height = _block_rows(size, x.shape[-2] if tall else x.shape[-1], tall=tall) if x.dim() == 2 else size
    if height >= size:
        product(left, right, factor, out)
        return
    for start in range(0, size, height):
        stop = min(start + height, size)
        product(left[start:stop], right[:, start:], factor, out[start:stop, start:])
        if stop < size:
            out[stop:, start:stop].copy_(out[start:stop, stop:].mT)


def _block_rows(size: int, depth: int, *, tall: bool) -> int:
    """Return how many rows of a symmetric product are multiplied at a time, as measured on a core with matrix units.

    What is saved, up to half of the product, must be more than copies and the slower products of fewer rows cost.
    """
    if size >= _LARGE:
        return _LARGE // 3
    deep = depth >= 2 * size and size >= (_TALL if tall else _WIDE)
    return -(-size // max(1, round(size / _BLOCK))) if deep else size


def product(left: torch.Tensor, right: torch.Tensor, factor: float, out: torch.Tensor) -> torch.Tensor:
    """Return `factor * left @ right`, rounded once.

    Args:
        left: a matrix, or a batch.
        right: another.
        factor: on the product.
        out: where the result goes.
    """
    if factor == 1.0:
        return torch.matmul(left, right, out=out)
    multiply = torch.baddbmm if out.dim() == 3 else torch.addmm
    return multiply(out, left, right, beta=0, alpha=factor, out=out)


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
