"""Symmetric matrices and the block rows that they are computed in."""

from __future__ import annotations

from functools import cache, cached_property
from typing import Final

import torch
from attrs import frozen

from megaopt_muon.products.onednn import onednn_height
from megaopt_muon.products.precision import has_matrix_units, multiplies_bfloat16

__all__ = [
    "Panel",
    "SymmetricMatrix",
    "block_height",
    "gram_height",
    "has_long_vectors",
    "panels_of",
    "symmetric_share",
]

# (smallest size, height of a block row, measured part of a full product's time), on one core. Below the smallest size
# one call of the matrix library is faster than several and the copy of a triangle.
_FLOAT32: Final = ((1500, 224, 0.70), (352, 128, 0.71), (240, 96, 0.90))
_FLOAT32_OF_AVX512_BF16: Final = (
    (1500, 224, 0.61),
    (600, 96, 0.65),
    (352, 64, 0.74),
    (256, 64, 0.79),
    (160, 64, 0.87),
    (128, 64, 0.93),
)
_FLOAT32_OF_AVX2: Final = (
    (1200, 224, 0.62),
    (900, 160, 0.65),
    (700, 128, 0.69),
    (352, 96, 0.73),
    (240, 96, 0.78),
    (192, 96, 0.87),
)
_BFLOAT16: Final = ((352, 128, 0.65), (240, 96, 0.80))

_ONEDNN_SHARES: Final = ((1500, 0.65), (700, 0.72), (448, 0.86))
"""(smallest size, measured part of a full product's time) of oneDNN's in float32."""

_GRAM_OF_ROWS: Final = ((768, 224), (0, 160))
"""(smallest size, height) for float32 `x x^T` where `x` is read along its rows twice: with AVX-512 lower blocks are
slower there, but not on processors whose vectors also multiply bfloat16."""


@cache
def has_long_vectors() -> bool:
    """Return whether this processor has vectors of 512 bits, or is none whose vectors are known to have 256.

    Example:
        >>> has_long_vectors() != (torch.backends.cpu.get_cpu_capability() == "AVX2")
        True
    """
    return torch.backends.cpu.get_cpu_capability() != "AVX2"


def _float32() -> tuple[tuple[int, int, float], ...]:
    """Return what was measured on processors like this one."""
    if not has_long_vectors():
        return _FLOAT32_OF_AVX2
    # Threads share a product: each of two would have too little of a low block row.
    single = multiplies_bfloat16() and not has_matrix_units() and torch.get_num_threads() == 1
    return _FLOAT32_OF_AVX512_BF16 if single else _FLOAT32


def _measured(size: int, dtype: torch.dtype, device: torch.device) -> tuple[int, float]:
    if device.type == "cpu":
        for smallest, height, share in _BFLOAT16 if dtype.itemsize == 2 else _float32():
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


def symmetric_share(size: int, dtype: torch.dtype, device: torch.device, *, onednn: bool = False) -> float:
    """Return the part of a full product's work that a symmetric one of this size takes.

    Args:
        size: rows of the (square) result.
        dtype: of the operands.
        device: where they are.
        onednn: oneDNN multiplies.

    Example:
        >>> symmetric_share(64, torch.float32, torch.device("cpu"))
        1.0
    """
    if onednn:
        return next((share for smallest, share in _ONEDNN_SHARES if size >= smallest), 1.0)
    return _measured(size, dtype, device)[1]


def gram_height(size: int) -> int | None:
    """Return the height of the block rows of a float32 `x x^T`; None for that of other products.

    Args:
        size: rows of the result, of which there are several block rows.
    """
    if size >= _FLOAT32[0][0] or _float32() is not _FLOAT32:
        return None
    return next(height for smallest, height in _GRAM_OF_ROWS if size >= smallest)


@frozen(eq=False)
class Panel:
    """What products read and write of one block row, beginning at the diagonal.

    Args:
        rows: the whole block row.
        columns: all columns from the diagonal block on.
        upper: the block row from the diagonal block on.
        right: the transpose of the block row behind the diagonal block; empty in the last one.
        below: where that belongs as well.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    upper: torch.Tensor
    right: torch.Tensor
    below: torch.Tensor

    def mirror(self) -> None:
        """Copy what lies behind the diagonal block below it, while it is still in the cache."""
        if self.right.numel():
            self.below.copy_(self.right)


def panels_of(values: torch.Tensor, height: int) -> list[Panel]:
    """Return the block rows of a matrix.

    Args:
        values: `[*batch, n, n]`.
        height: rows of each but the last.
    """
    panels = []
    for start in range(0, values.shape[-1], height):
        stop = start + height
        rows = values[..., start:stop, :]
        panels.append(
            Panel(
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
        onednn: the products that give it are oneDNN's: one matrix without gaps in memory.
        size: rows that are not filled up with zeros; None: all.
    """

    values: torch.Tensor
    onednn: bool = False
    size: int | None = None

    @cached_property
    def inner(self) -> torch.Tensor:
        """It without the zeros that it is filled up with."""
        return self.values if self.size is None else self.values[..., : self.size, : self.size]

    @cached_property
    def panels(self) -> list[Panel]:
        """Its block rows."""
        values, size = self.values, self.values.shape[-1]
        if self.onednn:
            return panels_of(values, onednn_height(size))
        return panels_of(values, block_height(size, values.dtype, values.device))

    @cached_property
    def gram_panels(self) -> list[Panel]:
        """The block rows that oneDNN computes it in where it is a Gram matrix."""
        return panels_of(self.values, onednn_height(self.values.shape[-1], gram=True))

    def mirror(self) -> None:
        """Copy what lies above the diagonal below it."""
        for panel in self.panels:
            block = panel.upper[..., : panel.upper.shape[-2]].triu_()
            block.add_(block.triu(1).mT)
            panel.mirror()
