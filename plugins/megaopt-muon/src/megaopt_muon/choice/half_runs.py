"""Which steps of an iteration in float16 are run together on the Gram matrix.

Rounding leaves room there for runs of two and three gentle steps, so that time alone decides: a run of `k` steps costs
`4k - 3` products of small matrices and two of the whole one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from megaopt_muon.choice.schedule import cost_of_runs, is_gentle_step

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["half_runs"]

_SMALLEST: Final = 512
"""Rows from which on runs in float16 are faster: of smaller matrices an accelerator's time goes into calls."""

_FIRST, _LATER = 2, 3
"""Steps of a run in float16. With the three first the error is up to that of the plain iteration in bfloat16, so up to
0.7 of that."""


@lru_cache(maxsize=4096)
def half_runs(
    method: str, coefficients: Coefficients, small: int, large: int, share: float = 1.0
) -> tuple[int, ...]:
    """Return the runs of a matrix that is iterated in float16 (:mod:`megaopt_muon.newton_schulz.half`).

    Args:
        method: `"standard"` for single steps, `"gram"` and `"runs"` for runs, `"auto"` for the cheaper ones.
        coefficients: `(a, b, c)` of each step.
        small: the smaller dimension of the matrix.
        large: the larger one.
        share: the part of a whole product's time that a symmetric one takes.

    Example:
        >>> half_runs("auto", ((3.4445, -4.775, 2.0315),) * 5, 4096, 14336)
        (2, 3)
        >>> half_runs("auto", ((3.4445, -4.775, 2.0315),) * 5, 4096, 4096)
        (1, 1, 1, 1, 1)
    """
    steps = len(coefficients)
    single = (1,) * steps
    if method == "standard" or not all(is_gentle_step(*triple) for triple in coefficients):
        return single
    first = min(_FIRST, steps)
    runs = (first, *(min(_LATER, steps - done) for done in range(first, steps, _LATER)))
    if method != "auto":
        return runs
    if small < _SMALLEST:
        return single
    return min(runs, single, key=lambda lengths: cost_of_runs(lengths, share, large / small))
