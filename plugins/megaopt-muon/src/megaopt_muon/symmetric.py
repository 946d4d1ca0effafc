"""Matrix products whose result is known to be symmetric: only one triangle is computed, block row by block row."""

from __future__ import annotations

import torch

from megaopt_muon.hopper import symmetric_kernel

__all__ = ["block_rows", "symmetric_addmm", "symmetric_mm", "symmetric_share"]

# (smallest size, number of block rows, measured part of a full product's time), on one core with AVX-512. Below the
# smallest size one call of the matrix library is faster than several and the copy of a triangle.
_FLOAT32 = ((576, 6, 0.73), (352, 6, 0.71), (300, 3, 0.77), (224, 3, 0.88))
_BFLOAT16 = ((1500, 12, 0.65), (900, 8, 0.72), (600, 4, 0.71), (480, 4, 0.84), (352, 3, 0.88))

_FEW_ROWS = 4
"""Block rows at most when the inner dimension is twice the result's: the matrix library packs it anew for each."""


def block_rows(size: int, dtype: torch.dtype, device: torch.device, inner: int = 0) -> int:
    """Return the height of the block rows that a symmetric product of this size is computed in.

    Args:
        size: rows of the (square) result.
        dtype: of the operands.
        device: where they are; on an accelerator the product is one call.
        inner: the dimension that is summed over, if it may be larger than `size`.

    Returns:
        The height; `size` itself when one call is fastest.

    Example:
        >>> block_rows(64, torch.float32, torch.device("cpu"))
        64
    """
    rows, _ = _measured(size, dtype, device)
    if dtype.itemsize > 2 and inner >= 2 * size:
        rows = min(rows, _FEW_ROWS)
    return size if rows == 1 else -(-size // rows // 16) * 16


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


def _measured(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    if device.type == "cpu":
        for smallest, rows, share in _BFLOAT16 if dtype.itemsize == 2 else _FLOAT32:
            if size >= smallest:
                return rows, share
    return 1, 1.0


def symmetric_mm(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Compute `left @ right`, which the caller knows to be symmetric.

    Args:
        left: `[*batch, n, k]`, at most one batch dimension.
        right: `[*batch, k, n]`.
        out: `[*batch, n, n]`; may not share memory with the operands.

    Returns:
        `out`.

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> symmetric_mm(x, x.mT, torch.empty(2, 2)).tolist()
        [[5.0, 2.0], [2.0, 1.0]]
    """
    kernel = symmetric_kernel(out, left, right)
    if kernel is not None:
        kernel(left, right, out=out)
        return out
    size = out.shape[-1]
    height = block_rows(size, out.dtype, out.device, left.shape[-1])
    if height == size:
        return torch.matmul(left, right, out=out)
    multiply = torch.mm if out.dim() == 2 else torch.bmm
    for start in range(0, size, height):
        rows = slice(start, start + height)
        multiply(left[..., rows, :], right[..., start:], out=out[..., rows, start:])
    return _mirror(out, height)


def symmetric_addmm(
    base: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float,
    alpha: float,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute `beta * base + alpha * left @ right`, which the caller knows to be symmetric.

    Args:
        base: `[*batch, n, n]`; may be `out` itself.
        left: `[*batch, n, k]`, at most one batch dimension.
        right: `[*batch, k, n]`.
        beta: factor on `base`.
        alpha: factor on the product.
        out: `[*batch, n, n]`; may not share memory with `left` or `right`.

    Returns:
        `out`.

    Example:
        >>> eye = torch.eye(2)
        >>> symmetric_addmm(eye, eye, eye, beta=2.0, alpha=3.0, out=torch.empty(2, 2)).tolist()
        [[5.0, 0.0], [0.0, 5.0]]
    """
    kernel = symmetric_kernel(out, left, right, base)
    if kernel is not None:
        # A tile is written twice, also where another reads its base: they must not share memory.
        kernel(left, right, C=base.clone() if base is out else base, out=out, alpha=alpha, beta=beta)
        return out
    size = out.shape[-1]
    height = block_rows(size, out.dtype, out.device)
    multiply = torch.addmm if out.dim() == 2 else torch.baddbmm
    if height == size:
        return multiply(base, left, right, beta=beta, alpha=alpha, out=out)
    for start in range(0, size, height):
        rows = slice(start, start + height)
        target = out[..., rows, start:]
        multiply(
            base[..., rows, start:],
            left[..., rows, :],
            right[..., start:],
            beta=beta,
            alpha=alpha,
            out=target,
        )
    return _mirror(out, height)


def _mirror(out: torch.Tensor, height: int) -> torch.Tensor:
    """Copy what lies right of the diagonal blocks below them."""
    size = out.shape[-1]
    for start in range(0, size - height, height):
        stop = start + height
        out[..., stop:, start:stop].copy_(out[..., start:stop, stop:].mT)
    return out
