"""Which Newton-Schulz steps are run together on the Gram matrix.

A block of `k` steps costs `4k - 3` products of `n x n` matrices and two of the whole matrix, and begins with the Gram
matrix of the matrix itself. Longer blocks are cheaper for matrices that are not square. They lose accuracy in singular
values that are much smaller than others: within a block, what is applied to the matrix and what the Gram matrix says
was applied drift apart by rounding. How much depends on the coefficients and on the spectrum. What is chosen here was
measured (`benchmarks/muon_accuracy.py`): the error stays within 1.2 times the plain iteration's in float32, and twice
in bfloat16. Where float32 stands in for bfloat16, it stays within half of the plain iteration's in bfloat16.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from megaopt_muon.products.panels import symmetric_share

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = [
    "SPREAD_LIMIT",
    "Spectrum",
    "are_gentle",
    "are_measured",
    "are_tame",
    "cost_of_runs",
    "is_gentle_step",
    "largest_norm",
    "longest_blocks",
    "plan_blocks",
    "spectrum_of",
    "whole_runs",
]


class Spectrum(StrEnum):
    """What is known of a matrix's singular values.

    `UNKNOWN`: nothing. `SPREAD`: none of them stands out. `EVEN`: nor are many of them much smaller than the others.
    `BOUNDED`: nor is any of them; their squares are proven to lie above a twelfth of the mean square. Asked in float32
    only: in bfloat16 it allows nothing more.
    """

    UNKNOWN = "unknown"
    SPREAD = "spread"
    EVEN = "even"
    BOUNDED = "bounded"


SPREAD_LIMIT = 0.08
"""Frobenius norm of a Gram matrix of trace 1 up to which no singular value stands out."""

_SMALLEST_BLOCKS = 256
_EVEN_LIMIT = 1.6  # the same norm relative to that of equal eigenvalues; 1.41 for a square Gaussian matrix
_BOUNDED_LIMIT = 1.25  # likewise; 1.22 for a Gaussian matrix with twice as many columns as rows
_LEAST = 1.0 / 12.0
"""The bound of `BOUNDED`, in units of the mean eigenvalue; 0.086 for a Gaussian matrix of aspect 2."""

_LARGEST_SQUARE = 8.0
"""The most that completing a square may add to a diagonal; 5.1 in named sets, of which 16 bits lose a fiftieth."""

_MARGIN = 1.1
"""On the largest norm that coefficients allow. Rounding makes it 1.006 times as large at most, in bfloat16 and with any
spectrum and set; of what is 1.02 times as large or more the error was at least 0.29."""

_FARTHEST = 1e18
"""Norms that float32 can hold the squares of."""

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
    if device.type == "cpu" and (dtype.itemsize == 2 or onednn) and small < _SMALLEST_BLOCKS:
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


def spectrum_of(gram: torch.Tensor) -> Spectrum:
    """Return what the Frobenius norm of a Gram matrix of trace 1 tells of the singular values.

    Asked only on a CPU and for single matrices: an accelerator would have to wait for the answer.

    Args:
        gram: `[n, n]` or `[matrices, n, n]`.

    Example:
        >>> spectrum_of(torch.eye(256) / 256)
        <Spectrum.BOUNDED: 'bounded'>
    """
    size = gram.shape[-1]
    if gram.dim() != 2 or gram.device.type != "cpu" or size < SPREAD_LIMIT**-2:
        return Spectrum.UNKNOWN  # the norm is at least that of equal eigenvalues, 1 / sqrt(n)
    norm = torch.linalg.vector_norm(gram).item()
    if not norm <= SPREAD_LIMIT:
        return Spectrum.UNKNOWN
    unevenness = norm * math.sqrt(size)
    if unevenness > _EVEN_LIMIT:
        return Spectrum.SPREAD
    asked = unevenness <= _BOUNDED_LIMIT and gram.dtype.itemsize > 2
    return Spectrum.BOUNDED if asked and _is_bounded(gram) else Spectrum.EVEN


def _is_bounded(gram: torch.Tensor) -> bool:
    """Return whether all eigenvalues are above the bound: whether what is left of them has a Cholesky factor.

    That takes up to three quarters of the time of one product; the longer block saves several.
    """
    rest = gram.clone()
    diagonal = rest.diagonal()
    diagonal.sub_(_LEAST * diagonal.mean())
    return int(torch.linalg.cholesky_ex(rest).info) == 0


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
