"""What is known of a matrix's singular values."""

from __future__ import annotations

import math
from enum import StrEnum

import torch

__all__ = ["SPREAD_LIMIT", "Spectrum", "spectrum_of"]


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

_EVEN_LIMIT = 1.6  # the same norm relative to that of equal eigenvalues; 1.41 for a square Gaussian matrix
_BOUNDED_LIMIT = 1.25  # likewise; 1.22 for a Gaussian matrix with twice as many columns as rows
_LEAST = 1.0 / 12.0
"""The bound of `BOUNDED`, in units of the mean eigenvalue; 0.086 for a Gaussian matrix of aspect 2."""


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
