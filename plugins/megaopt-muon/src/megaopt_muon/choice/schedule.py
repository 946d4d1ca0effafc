"""Which Newton-Schulz steps are run together on the Gram matrix.

A block of `k` steps costs `4k - 3` products of `n x n` matrices and two of the whole matrix, and begins with the Gram
matrix of the matrix itself. Longer blocks are cheaper for matrices that are not square. They lose accuracy in singular
values that are much smaller than others: within a block, what is applied to the matrix and what the Gram matrix says
was applied drift apart by rounding. How much depends on the coefficients and on the spectrum. What is chosen here was
measured (`benchmarks/muon_accuracy.py`): the error stays within 1.2 times the plain iteration's in float32, and twice
in bfloat16. Where float32 stands in for bfloat16, it stays within half of the plain iteration's in bfloat16.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from megaopt_muon.choice.spectrum import SPREAD_LIMIT, Spectrum
from megaopt_muon.products.panels import symmetric_share

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = [
    "are_gentle",
    "are_measured",
    "cost_of_runs",
    "is_gentle_step",
    "longest_blocks",
    "plan_blocks",
    "whole_runs",
]


_SMALLEST_BLOCKS = 256
_LARGEST_SQUARE = 8.0
"""The most that completing a square may add to a diagonal; 5.1 in named sets, of which 16 bits lose a fiftieth."""

_LONGEST = 5
_STEEPEST = (8.5, 25.2, 18.7)
"""Sizes of the coefficients of the steepest step that was measured, the first one of `cans`."""


@lru_cache(maxsize=4096)
def plan_blocks(
    method: str,
    coefficients: Coefficients,
    small: int,
    large: int,
    device: torch.device,
    dtype: torch.dtype,
    spectrum: Spectrum,
    *,
    relaxed: bool = False,
    onednn: bool = False,
) -> tuple[int, ...]:
    """Return the lengths of the blocks that the steps are cut into, in order.

    Args:
        method: `"standard"` (every step is a block of its own), `"gram"` (blocks as bfloat16 allows them), `"runs"` (as
            the dtype does), or `"auto"`: the cheaper of the first and the last.
        coefficients: `(a, b, c)` of each step.
        small: the smaller dimension of the matrix, on which the Gram matrix is taken.
        large: the larger one.
        device: where it is.
        dtype: that the iteration computes in.
        spectrum: what is known of the singular values.
        relaxed: float32 stands in for bfloat16, with coefficients that :func:`are_measured`.
        onednn: oneDNN multiplies.
    """
    standard = (1,) * len(coefficients)
    if method == "standard":
        return standard
    if method == "gram":
        return longest_blocks(coefficients, dtype if relaxed else torch.bfloat16, spectrum, relaxed=relaxed)
    if method == "runs":
        return longest_blocks(coefficients, dtype, spectrum, relaxed=relaxed)
    if device.type == "cpu" and dtype.itemsize == 2 and small < _SMALLEST_BLOCKS:
        return standard  # products of so small matrices take no longer than what goes on around them
    share, aspect = symmetric_share(small, dtype, device, onednn=onednn), large / small
    blocks = longest_blocks(coefficients, dtype, spectrum, relaxed=relaxed)
    return min(standard, blocks, key=lambda lengths: cost_of_runs(lengths, share, aspect))


def longest_blocks(
    coefficients: Coefficients, dtype: torch.dtype, spectrum: Spectrum, *, relaxed: bool = False
) -> tuple[int, ...]:
    """Return the longest blocks that keep the accuracy.

    Gentle coefficients (no step multiplies small singular values by more than 4.1) allow blocks of two at both ends in
    bfloat16, and three at the beginning where no singular value stands out. Steeper sets overshoot in their first
    steps, where only single steps follow closely enough. In float32 the plain iteration is so accurate that only
    nearly even spectra leave room, with coefficients whose last steps settle. Where the singular values are bounded
    from below, five steps together are the more accurate ones, with any coefficients. Where float32 stands in for
    bfloat16, their error is less than half of bfloat16's with any spectrum.

    Args:
        coefficients: `(a, b, c)` of each step.
        dtype: that the iteration computes in.
        spectrum: what is known of the singular values.
        relaxed: float32 stands in for bfloat16, with coefficients that :func:`are_measured`.

    Example:
        >>> longest_blocks(((3.4445, -4.775, 2.0315),) * 5, torch.bfloat16, Spectrum.UNKNOWN)
        (2, 1, 2)
    """
    steps = len(coefficients)
    if dtype.itemsize > 2 and (spectrum is Spectrum.BOUNDED or relaxed):
        return tuple(min(_LONGEST, steps - done) for done in range(0, steps, _LONGEST))
    gentle = all(is_gentle_step(*triple) for triple in coefficients)
    if dtype.itemsize > 2:
        settles = gentle and steps == 5 and all(a < 3.0 for a, _, _ in coefficients[-2:])
        return (3, 2) if settles and spectrum is Spectrum.EVEN else (1,) * steps
    if gentle and steps == 5 and spectrum is not Spectrum.UNKNOWN:
        return (3, 2)
    if gentle and steps >= 5:
        return (2, *(1,) * (steps - 4), 2)
    if steps >= 6 and is_gentle_step(*coefficients[-1]) and is_gentle_step(*coefficients[-2]):
        return (*(1,) * (steps - 2), 2)
    return (1,) * steps


def whole_runs(coefficients: Coefficients, norm: float = 0.0) -> tuple[int, ...]:
    """Return the runs of a matrix of 16 bits that is iterated in whole products.

    Three and two steps of gentle coefficients where no singular value stands out, else single ones: there a run is not
    as accurate, or brings nothing.

    Args:
        coefficients: `(a, b, c)` of each step.
        norm: Frobenius norm of the Gram matrix, whose trace is 1.

    Example:
        >>> whole_runs(((3.4445, -4.775, 2.0315),) * 5)
        (3, 2)
    """
    steps = len(coefficients)
    allowed = steps == 5 and norm <= SPREAD_LIMIT and are_gentle(coefficients)
    return (3, 2) if allowed else (1,) * steps


@lru_cache(maxsize=64)
def are_gentle(coefficients: Coefficients) -> bool:
    """Return whether no step multiplies small singular values by more than 4.1, or overshoots, or is far from a square.

    A step `a I + b A + c A^2` that is made of one square has `b^2 / 4c` on its diagonal before `a` is added: where `c`
    is small beside `b`, rounding leaves nothing of the diagonal.

    Args:
        coefficients: `(a, b, c)` of each step.

    Example:
        >>> are_gentle(((3.4445, -4.775, 2.0315),)), are_gentle(((1.5, -0.5, 1e-6),))
        (True, False)
    """
    return all(
        is_gentle_step(a, b, c) and (c == 0.0 or b * b <= 4.0 * _LARGEST_SQUARE * c)
        for a, b, c in coefficients
    )


@lru_cache(maxsize=64)
def are_measured(coefficients: Coefficients) -> bool:
    """Return whether no step is steeper than those for which long runs in the place of bfloat16 were measured.

    Args:
        coefficients: `(a, b, c)` of each step.
    """
    return all(
        abs(value) <= most for triple in coefficients for value, most in zip(triple, _STEEPEST, strict=True)
    )


def is_gentle_step(a: float, b: float, c: float) -> bool:
    """Return whether a step multiplies small singular values by no more than 4.1, and does not overshoot.

    Args:
        a: of the matrix.
        b: of its Gram matrix, times the matrix.
        c: of the square of that, likewise.
    """
    return 1.0 <= a <= 4.1 and -7.1 <= b <= 0.0 and 0.0 <= c <= 3.0


def cost_of_runs(lengths: tuple[int, ...], share: float, aspect: float) -> float:
    """Return the work of an iteration in runs, in units of one product of small matrices.

    Args:
        lengths: steps of each run; a run of one is a single step.
        share: the part of a whole product's time that a symmetric one takes.
        aspect: of the matrix.
    """
    small = sum(4 * length - 3 for length in lengths)
    return share * small + (share + 1.0) * aspect * len(lengths)
