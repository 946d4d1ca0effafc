r"""Matrices of 16 bits whose diagonals are known in 32.

The eigenvalues of a Gram matrix, and of polynomials in it, lie close together on the whole, so that most of each matrix
is a multiple of the identity. Rounded, the elements of such a diagonal err alike, which is one common error in every
eigenvalue. What rounding did to a diagonal is known when it is written: :math:`M = V - D` with what is stored, `V`, and
a small diagonal `D`. Of a product

.. math:: (V - D)(W - E) = VW - VE - DW + DE

the diagonal of the two middle terms is taken off what the matrix library returns; off the diagonal they are small
times small. So every product is a plain one, without a base that would have to be copied and read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_muon.newton_schulz.scaled import Scaled, has_more_rows, take
from megaopt_muon.products.narrow import commuting, outer, outer_memory, product

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = [
    "Exact",
    "Triple",
    "accumulate",
    "apply",
    "first_polynomial",
    "gram_of",
    "polynomial",
    "single_polynomial",
]

type Triple = tuple[float, float, float]


@frozen(eq=False)
class Exact:
    """A symmetric matrix, whose diagonal as it should be is kept beside it.

    Args:
        values: the matrix, of 16 bits.
        diagonal: as it should be, float32.
        rounded: as it is stored, float32.
        scale: factor on all of these.
    """

    values: torch.Tensor
    diagonal: torch.Tensor
    rounded: torch.Tensor
    scale: float = 1.0

    @property
    def error(self) -> torch.Tensor:
        """What rounding added to the diagonal."""
        return self.rounded - self.diagonal


def _stored(values: torch.Tensor, diagonal: torch.Tensor, scale: float = 1.0) -> Exact:
    """Write a diagonal into a matrix.

    Args:
        values: the matrix.
        diagonal: float32.
        scale: factor on both.
    """
    rounded = diagonal.to(values.dtype)
    values.diagonal().copy_(rounded)
    return Exact(values, diagonal, rounded.to(diagonal.dtype), scale)


def gram_of(x: Scaled, trace: float, workspace: Workspace) -> Exact:
    """Return `X X^T`, or `X^T X` where `X` has more rows than columns.

    Args:
        x: one matrix.
        trace: of the result, which is known more exactly than its rounded diagonal tells.
        workspace: where the result lies.
    """
    tall = has_more_rows(x.values)
    values = outer_memory(x.values, workspace, tall=tall)
    outer(x.values, x.scale * x.scale, values, tall=tall)
    diagonal = values.diagonal().to(torch.float32)
    diagonal += (trace - float(diagonal.sum())) / values.shape[-1]
    return _stored(values, diagonal)


def single_polynomial(gram: torch.Tensor, triple: Triple, out: torch.Tensor) -> float:
    """Make the polynomial of :func:`polynomial`, in few calls, of a matrix that is then of no more use.

    Args:
        gram: the Gram matrix; overwritten.
        triple: `(x, y, z)`, of which the last is not 0.
        out: where the result goes.

    Returns:
        The factor on the result that makes its trace exact.
    """
    constant, linear, square = triple
    shift = linear / (2.0 * square)
    diagonal, shifted = gram.diagonal(), out.diagonal()
    exact = diagonal.to(torch.float32).add_(shift)
    diagonal.copy_(exact)
    rounded = diagonal.to(torch.float32)
    commuting(gram, gram, square, out)
    lost = exact.sub_(rounded)
    exact = shifted.to(torch.float32).add_(constant - square * shift * shift)
    exact.addcmul_(rounded, lost, value=2.0 * square)
    shifted.copy_(exact)
    return _factor(exact, shifted)


def _factor(exact: torch.Tensor, stored: torch.Tensor) -> float:
    """Return what takes back what rounding the diagonal did to all eigenvalues alike."""
    total = float(stored.sum(dtype=torch.float32))
    return float(exact.sum()) / total if total else 1.0


def polynomial(a: Exact, triple: Triple, out: torch.Tensor) -> Exact:
    r"""Return `W = x I + y A + z A^2`, as :math:`z (A + \frac{y}{2z} I)^2` and a multiple of the identity.

    Args:
        a: the Gram matrix, of scale 1; a part of its diagonal is overwritten until it writes it again.
        triple: `(x, y, z)`.
        out: where the result goes.
    """
    constant, linear, square = triple
    if square == 0.0:
        torch.mul(a.values, linear, out=out)
        return _stored(out, a.diagonal * linear + constant)
    shift = linear / (2.0 * square)
    shifted = _stored(a.values, a.diagonal + shift)
    commuting(a.values, a.values, square, out)
    diagonal = out.diagonal().to(torch.float32)
    diagonal.addcmul_(shifted.rounded, shifted.error, value=-2.0 * square).add_(
        constant - square * shift * shift
    )
    return _stored(out, diagonal)


def first_polynomial(a: Exact, triple: Triple, out: torch.Tensor) -> tuple[Exact, float]:
    """Return the same of a Gram matrix of trace 1, and its Frobenius norm, which is found on the way.

    The mean eigenvalue is taken out before the product, so that its diagonal tells the small sum of squares.

    Args:
        a: the Gram matrix, of trace 1.
        triple: coefficients.
        out: where the result goes.
    """
    constant, linear, square = triple
    size = a.values.shape[-1]
    mean = 1.0 / size
    beta = linear + 2.0 * square * mean
    if beta == 0.0 or square == 0.0:
        return polynomial(a, triple, out), math.inf
    centered = _stored(a.values, a.diagonal - mean)
    commuting(a.values, a.values, square / beta, out, a.values)
    diagonal = out.diagonal().to(torch.float32)
    of_squares = float(diagonal.sum() - centered.rounded.sum()) * beta / square
    norm = math.sqrt(of_squares + mean) if of_squares > -mean else math.inf
    diagonal.sub_(centered.error).add_((constant + linear * mean + square * mean * mean) / beta)
    return _stored(out, diagonal, beta), norm


def times(left: Exact, right: Exact, out: torch.Tensor) -> Exact:
    """Return the product of two matrices that commute.

    Args:
        left: one.
        right: the other, or the same.
        out: where the result goes.
    """
    factor = left.scale * right.scale
    commuting(left.values, right.values, factor, out)
    diagonal = out.diagonal().to(torch.float32)
    diagonal.addcmul_(left.rounded, right.error, value=-factor).addcmul_(
        left.error, right.rounded, value=-factor
    )
    return _stored(out, diagonal)


def accumulate(a: Exact, w: Exact, triples: Sequence[Triple], workspace: Workspace) -> Exact:
    """Return `Q` of several steps.

    Args:
        a: the Gram matrix that they begin at.
        w: the first one's polynomial in it.
        triples: `(a, b, c)` of each.
        workspace: where intermediate matrices live.
    """
    q = w
    for step, triple in enumerate(triples):
        if step:
            w = polynomial(a, triple, take("w1", a.values, workspace))
            q = times(q, w, take(f"q{step % 2}", a.values, workspace))
        if step < len(triples) - 1:
            a = _stored(a.values, a.diagonal)
            a = times(
                a, times(w, w, take("w2", a.values, workspace)), take(f"a{step % 2}", a.values, workspace)
            )
    return q


def apply(q: Exact, x: Scaled, out: torch.Tensor, factor: float = 1.0, *, tall: bool) -> Scaled:
    """Return `factor * Q X`, or `factor * X Q` for a tall matrix: its scale is 1.

    Args:
        q: what is applied.
        x: the matrix.
        out: where the result goes.
        factor: on the result.
        tall: multiply from the right.
    """
    factor *= q.scale * x.scale * _factor(q.diagonal, q.rounded)
    left, right = (x.values, q.values) if tall else (q.values, x.values)
    return Scaled(product(left, right, factor, out))
