"""Matrix products whose result is known to be symmetric: only one triangle is computed, block row by block row."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megaopt_muon.products.hopper import symmetric_kernel
from megaopt_muon.products.mkl import has_triangles, triangle_routine
from megaopt_muon.products.onednn import cuts, sum_of_products
from megaopt_muon.products.panels import (
    SymmetricMatrix,
    block_height,
    gram_height,
    has_long_vectors,
    panels_of,
)

__all__ = [
    "Scalar",
    "gram_matrix",
    "gram_of_columns",
    "is_one_product",
    "is_tall",
    "symmetric_product",
    "whole_symmetric",
]

type Scalar = float | torch.Tensor
"""One number, or one for each matrix of a batch, `[matrices, 1, 1]` in float32."""


def is_tall(x: torch.Tensor) -> bool:
    """Return whether `X^T X` is the cheaper of the two Gram matrices.

    Of a square matrix it is where block rows are multiplied in float32 with AVX-512: there a transposed left operand
    costs less than a transposed right one. With AVX2, and in MKL's triangles, it is the other way round.

    Args:
        x: `[*batch, rows, columns]`.
    """
    rows, columns = x.shape[-2:]
    if rows != columns or x.dtype.itemsize == 2 or not has_long_vectors():
        return rows > columns
    kind = (rows, x.dtype, x.device)
    return block_height(*kind) < rows and not has_triangles(*kind)


def is_one_product(matrix: SymmetricMatrix) -> bool:
    """Return whether a symmetric product of this size is one product, like any other.

    Args:
        matrix: the result.
    """
    values = matrix.values
    return len(matrix.panels) == 1 and (matrix.onednn or symmetric_kernel(values, values) is None)


def gram_matrix(x: torch.Tensor, out: SymmetricMatrix, *, tall: bool) -> SymmetricMatrix:
    """Compute `x x^T`, or `x^T x` for tall matrices.

    Args:
        x: `[*batch, rows, columns]`, at most one batch dimension.
        out: where the result goes, of the size of the rows; of the columns if tall.
        tall: multiply from the left by the transpose.

    Returns:
        `out`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> gram_matrix(x, SymmetricMatrix(torch.empty(2, 2)), tall=False).values.tolist()
        [[5.0, 2.0], [2.0, 1.0]]
    """
    left, right = (x.mT, x) if tall else (x, x.mT)
    kernel = symmetric_kernel(out.values, left, right)
    if kernel is not None:
        kernel(left, right, out=out.values)
        return out
    triangle = triangle_routine(out.values, left, right)
    if triangle is not None:
        triangle(left, right, out.values)
        out.mirror()
        return out
    panels, size = out.panels, out.values.shape[-1]
    if len(panels) == 1:
        torch.matmul(left, right, out=out.values)
        return out
    height = gram_height(size) if not tall and x.dtype.itemsize > 2 else None
    if height is not None:
        panels = panels_of(out.values, height)
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    start = 0
    for panel in panels:
        stop = start + panel.rows.shape[-2]
        multiply(left[..., start:stop, :], right[..., start:], out=panel.upper)
        panel.mirror()
        start = stop
    return out


def gram_of_columns(blocks: Sequence[torch.Tensor], out: SymmetricMatrix) -> SymmetricMatrix:
    """Compute `x x^T` by oneDNN, of a large one block row by block row.

    Args:
        blocks: of columns of `x`, each contiguous.
        out: where the result goes.

    Returns:
        `out`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> gram_of_columns([x], SymmetricMatrix(torch.empty(2, 2), onednn=True)).values.tolist()
        [[5.0, 2.0], [2.0, 1.0]]
    """
    start = 0
    for panel in out.gram_panels:
        stop = start + panel.rows.shape[0]
        panel.upper.copy_(sum_of_products((block[start:stop], block[start:]) for block in blocks))
        panel.mirror()
        start = stop
    return out


def symmetric_product(
    left: SymmetricMatrix,
    right: SymmetricMatrix,
    out: SymmetricMatrix,
    *,
    factor: float = 1.0,
    plus_left: Scalar = 0.0,
    plus_right: Scalar = 0.0,
) -> SymmetricMatrix:
    """Compute `factor * left @ right + plus_left * left + plus_right * right` of two matrices that commute.

    Args:
        left: the first matrix.
        right: the second one; may be the first.
        out: where the result goes; may not share memory with the operands.
        factor: on the product.
        plus_left: how often the first matrix is added.
        plus_right: how often the second one is added.

    Returns:
        `out`.

    Example:
        >>> eye, out = SymmetricMatrix(torch.eye(2)), SymmetricMatrix(torch.empty(2, 2))
        >>> symmetric_product(eye, eye, out, factor=3.0, plus_left=2.0).values.tolist()
        [[5.0, 0.0], [0.0, 5.0]]
    """
    base, other, share, beta = _summands(left, right, out, plus_left, plus_right)
    if out.onednn:
        return _by_onednn(left, right, out, factor, base, other, share, beta)
    kernel = symmetric_kernel(out.values, left.values, right.values, base.values)
    if kernel is not None:
        # A tile is written twice, also where another reads its base: they must not share memory.
        added = base.values.clone() if base is out else base.values
        if share:
            added = torch.add(added, other.values, alpha=share)
        kernel(left.values, right.values, C=added, out=out.values, alpha=factor, beta=beta)
        return out
    triangle = triangle_routine(out.values, left.values, right.values)
    multiply = torch.addmm if out.values.dim() == 2 else torch.baddbmm
    operands = zip(left.panels, right.panels, base.panels, other.panels, out.panels, strict=True)
    for of_left, of_right, of_base, of_other, target in operands:
        added = of_base.upper
        if share:
            added = torch.add(added, of_other.upper, alpha=share, out=target.upper)
        if triangle is None:
            multiply(added, of_left.rows, of_right.columns, beta=beta, alpha=factor, out=target.upper)
            target.mirror()
        elif beta:
            target.upper.copy_(added)
    if triangle is not None:
        triangle(left.values, right.values, out.values, alpha=factor, beta=beta)
        out.mirror()
    return out


def _by_onednn(
    left: SymmetricMatrix,
    right: SymmetricMatrix,
    out: SymmetricMatrix,
    factor: float,
    base: SymmetricMatrix,
    other: SymmetricMatrix,
    share: float,
    beta: float,
) -> SymmetricMatrix:
    """Compute `factor * left @ right + beta * (base + share * other)` in sums of few terms."""
    depths, whole = cuts(out.values.shape[0]), len(out.panels) == 1
    # Of symmetric matrices rows are columns; a part of some of them has to be copied.
    rights = [
        right.values[start:stop].mT if whole else right.values[:, start:stop].contiguous()
        for start, stop in depths
    ]
    begin = 0
    for target, of_base, of_other in zip(out.panels, base.panels, other.panels, strict=True):
        rows = left.values[begin : begin + target.rows.shape[0]]
        if factor == 0.0:
            sums = torch.zeros_like(target.upper)
        else:
            sums = sum_of_products(
                (rows[:, start:stop], columns[begin:])
                for (start, stop), columns in zip(depths, rights, strict=True)
            )
            sums.mul_(factor)
        if beta:
            sums.add_(of_base.upper, alpha=beta)
            if share:
                sums.add_(of_other.upper, alpha=beta * share)
        target.upper.copy_(sums)
        target.mirror()
        begin += rows.shape[0]
    return out


def whole_symmetric(
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> torch.Tensor:
    """Compute `alpha * left @ right + beta * added`, which is symmetric, in one product.

    Args:
        left: `[n, k]` or `[matrices, n, k]`.
        right: `[*matrices, k, n]`.
        out: where the result goes; may not share memory with the operands.
        added: the matrix that is added; None for none.
        alpha: factor on the product.
        beta: factor on what is added.

    Returns:
        `out`.

    Example:
        >>> eye = torch.eye(2)
        >>> whole_symmetric(eye, eye, out=torch.empty(2, 2), added=eye, alpha=3.0, beta=2.0).tolist()
        [[5.0, 0.0], [0.0, 5.0]]
    """
    kernel = symmetric_kernel(out, left, right, *(() if added is None else (added,)))
    if kernel is not None:
        kernel(left, right, C=added, out=out, alpha=alpha, beta=beta)
    elif added is None:
        (torch.mm if out.dim() == 2 else torch.bmm)(left, right, out=out)
    else:
        add = torch.addmm if out.dim() == 2 else torch.baddbmm
        add(added, left, right, beta=beta, alpha=alpha, out=out)
    return out


def _summands(
    left: SymmetricMatrix,
    right: SymmetricMatrix,
    out: SymmetricMatrix,
    plus_left: Scalar,
    plus_right: Scalar,
) -> tuple[SymmetricMatrix, SymmetricMatrix, float, float]:
    """Return `(base, other, share, beta)` for which `beta * (base + share * other)` is what the product is added to."""
    if left is right:
        plus = plus_left + plus_right
        if not isinstance(plus, torch.Tensor):
            return left, left, 0.0, plus
        torch.mul(left.values, plus, out=out.values)
        return out, out, 0.0, 1.0
    if isinstance(plus_left, torch.Tensor) or isinstance(plus_right, torch.Tensor):
        torch.mul(right.values, plus_right, out=out.values)
        out.values.add_(left.values * plus_left)
        return out, out, 0.0, 1.0
    if abs(plus_left) >= abs(plus_right):
        return left, right, plus_right / plus_left if plus_left else 0.0, plus_left
    return right, left, plus_left / plus_right, plus_right
