"""Matrix products whose result is known to be symmetric: only one triangle is computed, block row by block row."""

from __future__ import annotations

from typing import Final

import torch
from attrs import field, frozen

from megaopt_muon.hopper import symmetric_kernel
from megaopt_muon.mkl import triangle_routine

__all__ = [
    "Scalar",
    "SymmetricMatrix",
    "block_height",
    "gram_matrix",
    "symmetric_product",
    "symmetric_share",
]

type Scalar = float | torch.Tensor
"""One number, or one for each matrix of a batch, `[matrices, 1, 1]` in float32."""

# (smallest size, height of a block row, measured part of a full product's time), on one core with AVX-512. Below the
# smallest size one call of the matrix library is faster than several and the copy of a triangle.
_FLOAT32: Final = ((1500, 224, 0.70), (352, 128, 0.71), (240, 96, 0.90))
_BFLOAT16: Final = ((352, 128, 0.65), (240, 96, 0.80))

_GRAM_OF_ROWS: Final = ((768, 224), (0, 160))
"""(smallest size, height) for float32 `x x^T` where `x` is read along its rows twice: lower blocks are slower there."""


def _measured(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    if device.type == "cpu":
        for smallest, height, share in _BFLOAT16 if dtype.itemsize == 2 else _FLOAT32:
            if size >= smallest:
                return height, share
    return size, 1.0


def block_height(size: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the height of the block rows that a symmetric product of this size is computed in.

    Args:
        size: rows of the (square) result.
        dtype: of the operands.
        device: where they are; on an accelerator the product is one call.

    Returns:
        The height; `size` itself when one call is fastest.

    Example:
        >>> block_height(64, torch.float32, torch.device("cpu"))
        64
    """
    return _measured(size, dtype, device)[0]


def symmetric_share(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the part of a full product's work that a symmetric one of this size takes.

    Args:
        size: rows of the (square) result.
        dtype: of the operands.
        device: where they are.

    Example:
        >>> symmetric_share(64, torch.float32, torch.device("cpu"))
        1.0
    """
    return _measured(size, dtype, device)[1]


@frozen(eq=False)
class _Panel:
    """What products read and write of one block row, beginning at the diagonal."""

    rows: torch.Tensor
    """The whole block row."""
    columns: torch.Tensor
    """All columns from the diagonal block on."""
    upper: torch.Tensor
    """The block row from the diagonal block on."""
    right: torch.Tensor
    """The transpose of the block row behind the diagonal block; empty in the last one."""
    below: torch.Tensor
    """Where that belongs as well."""

    def mirror(self) -> None:
        """Copy what lies behind the diagonal block below it, while it is still in the cache."""
        if self.right.numel():
            self.below.copy_(self.right)


def _panels(values: torch.Tensor, height: int) -> list[_Panel]:
    panels = []
    for start in range(0, values.shape[-1], height):
        stop = start + height
        rows = values[..., start:stop, :]
        panels.append(
            _Panel(
                rows=rows,
                columns=values[..., start:],
                upper=rows[..., start:],
                right=rows[..., stop:].mT,
                below=values[..., stop:, start:stop],
            )
        )
    return panels


@frozen(eq=False)
class SymmetricMatrix:
    """A symmetric matrix, or a batch of them, with the views that products by block rows need, made once.

    Args:
        values: `[*batch, n, n]`, at most one batch dimension.
    """

    values: torch.Tensor
    panels: list[_Panel] = field(init=False)

    @panels.default
    def _cut(self) -> list[_Panel]:
        values = self.values
        return _panels(values, block_height(values.shape[-1], values.dtype, values.device))

    def mirror(self) -> None:
        """Copy what lies above the diagonal below it."""
        for panel in self.panels:
            block = panel.upper[..., : panel.upper.shape[-2]].triu_()
            block.add_(block.triu(1).mT)
            panel.mirror()


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
    if not tall and x.dtype.itemsize > 2 and size < _FLOAT32[0][0]:
        height = next(height for smallest, height in _GRAM_OF_ROWS if size >= smallest)
        panels = _panels(out.values, height)
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    start = 0
    for panel in panels:
        stop = start + panel.rows.shape[-2]
        multiply(left[..., start:stop, :], right[..., start:], out=panel.upper)
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
