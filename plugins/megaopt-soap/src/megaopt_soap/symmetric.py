"""Symmetric matrices of which the upper triangle is computed, block row by block row."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["accumulate_gram", "completed"]

_SMALLEST: Final = 512
"""Below this size one call of the matrix library is as fast as several."""
_HEIGHT: Final = 192
"""Rows of a block, as measured on one core with AVX-512."""


def accumulate_gram(total: torch.Tensor, rows: torch.Tensor, weight: float) -> None:
    r"""Compute the upper triangle of :math:`S \leftarrow (1 - w) S + w A A^\top` in place.

    Args:
        total: `S`, `[n, n]`; what is below its diagonal is not defined afterwards.
        rows: `A`, `[n, k]`, of the same dtype; any strides.
        weight: `w`.

    Example:
        >>> total = torch.zeros(2, 2)
        >>> accumulate_gram(total, torch.tensor([[1.0, 2.0], [0.0, 1.0]]), 0.5)
        >>> completed(total).tolist()
        [[2.5, 1.0], [1.0, 0.5]]
    """
    columns = rows.mT
    for start, stop in _blocks(total):
        total[start:stop, start:].addmm_(
            rows[start:stop], columns[:, start:], beta=1.0 - weight, alpha=weight
        )


def completed(total: torch.Tensor) -> torch.Tensor:
    """Copy what lies above the diagonal below it.

    Args:
        total: `[n, n]`, changed in place.

    Returns:
        The same tensor.
    """
    for start, stop in _blocks(total):
        block = total[start:stop, start:stop]
        block.copy_(block.triu().add_(block.triu(1).mT))
        total[stop:, start:stop].copy_(total[start:stop, stop:].mT)
    return total


def _blocks(total: torch.Tensor) -> list[tuple[int, int]]:
    size = len(total)
    height = _HEIGHT if total.device.type == "cpu" and size >= _SMALLEST else max(1, size)
    return [(start, min(size, start + height)) for start in range(0, size, height)]
