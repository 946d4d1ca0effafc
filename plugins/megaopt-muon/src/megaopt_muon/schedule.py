"""Which Newton-Schulz steps are iterated together on the Gram matrix."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["plan_blocks"]


@lru_cache(maxsize=4096)
def plan_blocks(
    method: str, coefficients: Coefficients, small: int, large: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the lengths of the blocks that the steps are cut into, in order.

    Args:
        method: `"standard"` (every step is a block of its own), `"gram"` or `"auto"`.
        coefficients: `(a, b, c)` of each step.
        small: the smaller dimension of the matrix.
        large: the larger one.
        dtype: that the iteration computes in.
    """
    steps = len(coefficients)
    return (1,) * steps
