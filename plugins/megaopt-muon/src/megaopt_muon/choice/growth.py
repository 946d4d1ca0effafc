"""How far coefficients drive singular values."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["are_tame", "largest_norm"]

_MARGIN = 1.1
"""On the largest norm that coefficients allow. Rounding makes it 1.006 times as large at most, in bfloat16 and with any
spectrum and set; of what is 1.02 times as large or more the error was at least 0.29."""

_FARTHEST = 1e18
"""Norms that float32 can hold the squares of."""


@lru_cache(maxsize=64)
def are_tame(coefficients: Coefficients) -> bool:
    """Return whether no singular value up to 1 is driven away, also with three percent of rounding in every step.

    Args:
        coefficients: `(a, b, c)` of each step.

    Example:
        >>> are_tame(((3.4445, -4.775, 2.0315),) * 5), are_tame(((8.4703, -25.1081, 18.6293),) * 5)
        (True, False)
    """
    largest = 1.03
    for a, b, c in coefficients:
        values = (largest * index / 999 for index in range(1000))
        largest = 1.03 * max(abs(s * (a + s * s * (b + s * s * c))) for s in values)
        if not largest < 2.0:
            return False
    return True


def largest_norm(coefficients: Coefficients, rows: int, columns: int) -> float:
    """Return the largest Frobenius norm that the steps leave of a matrix of norm 1, with some margin for rounding.

    Args:
        coefficients: `(a, b, c)` of each step.
        rows: of the matrix.
        columns: of the matrix.

    Returns:
        The norm; infinite where the coefficients bound nothing that float32 could tell.

    Example:
        >>> round(largest_norm(((1.5, -0.5, 0.0),) * 5, 16, 64), 3)
        4.4
    """
    norm = _MARGIN * _largest_value(coefficients) * math.sqrt(min(rows, columns))
    return norm if norm < _FARTHEST else math.inf


@lru_cache(maxsize=64)
def _largest_value(coefficients: Coefficients) -> float:
    """Return a bound, a close one for sets that settle, on what the steps make of singular values up to 1."""
    largest = 1.0
    for a, b, c in coefficients:
        values = (largest * index / 999 for index in range(1000))
        largest = max(abs(s * (a + s * s * (b + s * s * c))) for s in values)
        if not largest < _FARTHEST:
            return math.inf
    return largest
