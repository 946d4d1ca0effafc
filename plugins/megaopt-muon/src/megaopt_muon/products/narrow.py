"""Products of 16 bits on a processor: whole, or of symmetric ones the block rows right of the diagonal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from megaopt_muon.products.precision import has_matrix_units

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["commuting", "outer", "outer_memory", "product"]

_BLOCK: Final = 256
"""Rows of a block on matrix units, about."""

_TALL: Final = 512
"""Rows from which on `X^T X` of a matrix at least twice as long as wide is made by blocks there."""

_WIDE: Final = 640
"""The same of `X X^T`."""

_LARGE: Final = 1536
"""The same of any `X X^T`."""

_VECTORS: Final = ((1024, 128), (352, 192))
"""(smallest size, height of a block row) where vectors multiply."""

_VECTORS_DEEP: Final = (256, 128)
"""The same for products at least twice as deep as wide."""

_LEAST: Final = 2.0**-150
"""Half of the smallest number of float32, which a factor becomes on its way into a product: what is no larger is 0."""


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    base: torch.Tensor | None = None,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return `factor * left @ right`, or `factor * left @ right + beta * base`, rounded once.

    Nothing is multiplied where the factor is 0: `torch.baddbmm` of 16 bits then leaves memory as it finds it.

    Args:
        left: a matrix, or a batch.
        right: another.
        factor: on the product.
        out: where the result goes.
        base: what is added.
        beta: on it: of few values, since a kernel is compiled for each.
    """
    if base is None and factor == 1.0:
        return (torch.bmm if out.dim() == 3 else torch.mm)(left, right, out=out)
    if abs(factor) <= _LEAST:
        return out.zero_() if base is None or beta == 0.0 else torch.mul(base, beta, out=out)
    multiply = torch.baddbmm if out.dim() == 3 else torch.addmm
    if base is None:
        return multiply(out, left, right, beta=0, alpha=factor, out=out)
    return multiply(base, left, right, beta=beta, alpha=factor, out=out)


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

    Of a large one, block rows are multiplied right of the diagonal only, and copied below it; a batch is whole.

    Args:
        x: `[n, k]` or `[matrices, n, k]`.
        factor: on the product.
        out: where it goes.
        tall: take the product over the rows.
    """
    left, right = (x.mT, x) if tall else (x, x.mT)
    if out.dim() == 3:
        product(left, right, factor, out)
        return
    size, depth = out.shape[-1], left.shape[-1]
    height = _rows_on_matrix_units(size, depth, tall=tall) if has_matrix_units() else _rows(size, depth)
    _by_rows(left, right, factor, out, height)


def commuting(
    left: torch.Tensor,
    right: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    base: torch.Tensor | None = None,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return :func:`product` of symmetric matrices that commute, so that it is symmetric.

    On matrix units the product is whole: of square matrices, blocks save less than they cost.

    Args:
        left: a matrix, or a batch.
        right: another, or the same.
        factor: on the product.
        out: where the result goes; shares no memory with the operands.
        base: a symmetric matrix that is added.
        beta: on it.
    """
    if out.dim() == 3:
        return product(left, right, factor, out, base, beta)
    size = out.shape[-1]
    height = size if has_matrix_units() else _rows(size, size)
    return _by_rows(left, right, factor, out, height, base, beta)


def _by_rows(
    left: torch.Tensor,
    right: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    height: int,
    base: torch.Tensor | None = None,
    beta: float = 1.0,
) -> torch.Tensor:
    """Return a product known to be symmetric, of which so many rows are multiplied at a time."""
    size = out.shape[-1]
    if height >= size:
        return product(left, right, factor, out, base, beta)
    for start in range(0, size, height):
        stop = min(start + height, size)
        added = None if base is None else base[start:stop, start:]
        product(left[start:stop], right[:, start:], factor, out[start:stop, start:], added, beta)
        if stop < size:
            out[stop:, start:stop].copy_(out[start:stop, stop:].mT)
    return out


def _rows_on_matrix_units(size: int, depth: int, *, tall: bool) -> int:
    """Return how many rows of `X X^T` are multiplied at a time, as measured on a core with matrix units.

    What is saved, up to half of the product, must be more than copies and the slower products of fewer rows cost.
    """
    if size >= _LARGE:
        return _LARGE // 3
    deep = depth >= 2 * size and size >= (_TALL if tall else _WIDE)
    return _even(size, _BLOCK) if deep else size


def _rows(size: int, depth: int) -> int:
    """Return the same as measured on a core whose vectors multiply: a product of few rows is as fast as any other."""
    if depth >= 2 * size and size >= _VECTORS_DEEP[0]:
        return _even(size, _VECTORS_DEEP[1])
    height = next((height for smallest, height in _VECTORS if size >= smallest), size)
    return _even(size, height)


def _even(size: int, height: int) -> int:
    """Return about this height, so that block rows are equally high."""
    return -(-size // max(1, round(size / height)))
