r"""Newton-Schulz in float16: an accelerator multiplies it as fast as bfloat16, and it is rounded eight times finer.

Nothing is scaled by what the data say, so that a step is products with constant factors, and waits for nothing:

.. math::
    W = a I + b A + c A^2, \qquad Q \leftarrow Q W, \qquad A \leftarrow W A W

A run of steps begins at :math:`A = X X^\top` with `W` as `Q`, and ends with :math:`X \leftarrow Q X`; a single step is
a run of one. The range of float16 is kept by a scale: matrices begin with a norm of :math:`s`, where :math:`s^2` is a
power of two near the number of rows, at most 128, and `b` and `c` are divided by :math:`s^2` and :math:`s^4`. So the
diagonal of `A` is not far from 1, and where one singular value stands out no sum of products leaves the range, in
which a matrix library may keep parts of it.

The error of five steps is a fifth of the plain iteration's in bfloat16, and at most 0.71 of it over many spectra, also
in runs of two and three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from megaopt_muon.products.symmetric import whole_symmetric

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["half_scale", "iterate_half"]

_LARGEST: Final = 7
"""Of a power of two for the scale's square: an eigenvalue of `A` reaches 1.5 times it, one of `A A` the square of that,
and float16 ends at 2**16."""


def half_scale(rows: int) -> float:
    """Return the norm that matrices have at the beginning.

    Args:
        rows: the smaller dimension of the matrix.

    Example:
        >>> half_scale(16), half_scale(64), half_scale(768) ** 2
        (4.0, 8.0, 128.00000000000003)
    """
    return math.sqrt(2.0 ** min(math.floor(math.log2(max(rows, 1))), _LARGEST))


def iterate_half(
    x: torch.Tensor,
    coefficients: Coefficients,
    runs: Sequence[int],
    scale: float,
    *,
    tall: bool,
) -> torch.Tensor:
    """Run all steps.

    Args:
        x: `[rows, columns]` or `[matrices, rows, columns]`, float16, of norm `scale`; used up.
        coefficients: `(a, b, c)` of each step, which drive no singular value away.
        runs: how many steps each run has.
        scale: the norm.
        tall: iterate on `A = X^T X` instead of `A = X X^T`.

    Returns:
        The result, `scale` times as large as orthogonalized matrices.

    Example:
        >>> x = torch.eye(2, 3).half()
        >>> o = iterate_half(x, ((1.5, -0.5, 0.0),) * 8, (3, 3, 2), 2.0**0.5, tall=False) / 2.0**0.5
        >>> torch.allclose(o @ o.mT, torch.eye(2).half(), atol=1e-2)
        True
    """
    multiply: Callable[..., torch.Tensor] = torch.mm if x.dim() == 2 else torch.bmm
    size = min(x.shape[-2:])
    a, w, q, spare = (x.new_empty((*x.shape[:-2], size, size)) for _ in range(4))
    other, square, done = torch.empty_like(x), scale * scale, 0
    for length in runs:
        whole_symmetric(*((x.mT, x) if tall else (x, x.mT)), out=a)
        for number, (first, second, third) in enumerate(coefficients[done : done + length]):
            whole_symmetric(a, a, out=w, added=a, alpha=third / square**2, beta=second / square)
            w.diagonal(dim1=-2, dim2=-1).add_(first)
            if number:
                q, spare = whole_symmetric(q, w, out=spare), q
            if number < length - 1:
                product = whole_symmetric(a, w, out=spare)
                whole_symmetric(product, w, out=a)
            if not number:
                q, w = w, q
        x, other = multiply(*((x, q) if tall else (q, x)), out=other), x
        done += length
    return x
