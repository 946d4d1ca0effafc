r"""Several Newton-Schulz steps at once, on the Gram matrix.

For :math:`A = X X^\top`, every step multiplies `X` by a polynomial in `A`, and takes `A` to another one:

.. math:: W = a I + b A + c A^2, \qquad Q \leftarrow Q W, \qquad A \leftarrow W A W

so that `k` steps cost products of the small `n x n` matrices alone, and one large product :math:`Q X` at the end.

Rounding is what makes or breaks this: the eigenvalues of all three matrices lie close together on the whole, so that
most of each matrix is a multiple of the identity, whose rounding is one common error in every eigenvalue. Each matrix
is therefore held as :math:`\pi I + P` with the mean eigenvalue :math:`\pi` apart, in full precision, and a `P` of
zero trace. The polynomials are expanded accordingly:

.. math::
    (\sigma I + S)^2 &= \sigma^2 I + 2 \sigma S + S^2 \\
    (\pi I + P)(\tau I + T) &= \pi \tau I + \pi T + \tau P + P T
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megaopt_muon.products.panels import SymmetricMatrix
from megaopt_muon.products.precision import at_least_float32
from megaopt_muon.products.symmetric import Scalar, symmetric_product
from megaopt_muon.products.workspace import Workspace

__all__ = ["accumulate", "center", "scaled_product", "whole_steps"]


def accumulate(
    gram: SymmetricMatrix, coefficients: Sequence[tuple[float, float, float]], workspace: Workspace
) -> tuple[Scalar, torch.Tensor]:
    """Return `Q = pi I + P` of several steps that begin at a Gram matrix.

    Args:
        gram: `[n, n]` or `[matrices, n, n]`; used up.
        coefficients: `(a, b, c)` of each step.
        workspace: where intermediate matrices live.

    Returns:
        `(pi, P)`; `P` lies in the workspace.
    """
    like = (gram.values.shape, gram.values.dtype, gram.values.device)
    z, m, spare = (workspace.take_symmetric(name, *like, onednn=gram.onednn) for name in ("z", "m", "spare"))
    most = torch.finfo(gram.values.dtype).max
    sigma: Scalar = center(gram.inner)
    q: Scalar = 1.0
    for step, (a, b, c) in enumerate(coefficients):
        factor = z if step else m
        symmetric_product(gram, gram, factor, factor=c, plus_left=_held(b + 2.0 * c * sigma, most))
        w = _held(a + b * sigma + c * sigma * sigma + center(factor.inner), most)
        if step:
            # (q I + m)(w I + factor), but for the multiple of the identity; so below.
            symmetric_product(m, factor, spare, plus_left=w, plus_right=q)
            q = _held(q * w + center(spare.inner), most)
            m, spare = spare, m
        else:
            q = w
        if step < len(coefficients) - 1:
            symmetric_product(gram, factor, spare, plus_left=w, plus_right=sigma)
            half = _held(sigma * w + center(spare.inner), most)
            symmetric_product(spare, factor, gram, plus_left=w, plus_right=half)
            sigma = _held(half * w + center(gram.inner), most)
    return q, m.values


def _held(number: Scalar, most: float) -> Scalar:
    """Return a number as a dtype holds it: infinite beyond its range, where torch refuses a number of Python's."""
    if isinstance(number, torch.Tensor) or not abs(number) > most:
        return number
    return math.copysign(math.inf, number)


def center(matrix: torch.Tensor) -> Scalar:
    """Subtract the mean of the diagonal from it, in place, and return the mean.

    Args:
        matrix: `[n, n]` or `[matrices, n, n]`.

    Returns:
        A number for one matrix on a CPU; else a tensor, so that nothing waits for an accelerator.

    Example:
        >>> m = torch.tensor([[1.0, 5.0], [5.0, 3.0]])
        >>> center(m), m.tolist()
        (2.0, [[-1.0, 5.0], [5.0, 1.0]])
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    if matrix.dim() == 2 and matrix.device.type == "cpu":
        mean = matrix.trace().item() / matrix.shape[-1]  # which is summed in float64
        diagonal.sub_(mean)
        return mean
    means = diagonal.mean(dim=-1, keepdim=True)
    diagonal.sub_(means)
    return means.unsqueeze(-1).to(at_least_float32(matrix.dtype))


def scaled_product(
    q: Scalar, m: torch.Tensor, x: torch.Tensor, *, tall: bool, out: torch.Tensor
) -> torch.Tensor:
    """Compute `(q I + m) x`, or `x (q I + m)` for tall matrices.

    Args:
        q: the multiple of the identity.
        m: `[n, n]` or `[matrices, n, n]`.
        x: `[n, k]`, `[k, n]` if tall, or a batch of them.
        tall: multiply from the right.
        out: where the result goes.
    """
    left, right = (x, m) if tall else (m, x)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    if isinstance(q, torch.Tensor):
        torch.mul(x, q, out=out)
        return multiply(out, left, right, out=out)
    return multiply(x, left, right, beta=q, out=out)


def whole_steps(
    x: torch.Tensor,
    other: torch.Tensor,
    gram: torch.Tensor,
    m: torch.Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    *,
    tall: bool,
) -> torch.Tensor:
    """Run all steps one by one, each in three whole products: small matrices, where calls count.

    Args:
        x: `[rows, columns]` or `[matrices, rows, columns]`; used up.
        other: memory of the same shape.
        gram: the Gram matrix of `x`; used up.
        m: memory of the same shape.
        coefficients: `(a, b, c)` of each step.
        tall: multiply from the right.

    Returns:
        The result, in one of the two memories.
    """
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    for number, (a, b, c) in enumerate(coefficients):
        if number:
            torch.matmul(*((x.mT, x) if tall else (x, x.mT)), out=gram)
        multiply(gram, gram, gram, beta=b, alpha=c, out=m)
        left, right = (x, m) if tall else (m, x)
        x, other = multiply(x, left, right, beta=a, out=other), x
    return x
