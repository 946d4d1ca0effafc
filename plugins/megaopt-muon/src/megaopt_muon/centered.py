r"""Matrices of 16 bits that are held as a multiple of the identity and a rest of zero trace.

:mod:`megaopt_muon.gram` tells why. Numbers that depend on the data stay beside the matrices, as
:mod:`megaopt_muon.whole` explains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_muon.scaled import Scaled, has_more_rows, outer, take

if TYPE_CHECKING:
    from megaopt_muon.workspace import Workspace

__all__ = ["Centered", "Triple", "accumulate", "apply", "gram_of", "norm_of", "polynomial"]

type Triple = tuple[float, float, float]


@frozen(eq=False)
class Centered:
    """`mean * I + scale * values`.

    Args:
        mean: the mean eigenvalue.
        scale: the factor.
        values: a matrix of zero trace.
    """

    mean: float
    scale: float
    values: torch.Tensor


def gram_of(x: Scaled, trace: float, workspace: Workspace) -> Centered:
    """Return `X X^T`, whose trace is known more exactly than its rounded diagonal tells.

    Where singular values are nearly equal, so are the elements of the diagonal, which then round all the same way.

    Args:
        x: one matrix; `X^T X` is taken where it has more rows than columns.
        trace: of the result.
        workspace: where the result lies.
    """
    gram = outer(x.values, 1.0, workspace, tall=has_more_rows(x.values))
    _center(gram)
    return Centered(trace / gram.shape[-1], x.scale * x.scale, gram)


def polynomial(a: Centered, triple: Triple, out: torch.Tensor) -> Centered:
    """Return `W = a I + b A + c A^2`.

    Args:
        a: the Gram matrix.
        triple: `(a, b, c)`.
        out: where the result goes.
    """
    constant, linear, square = triple
    beta = (linear + 2.0 * square * a.mean) * a.scale
    w = _sum(a.values, beta, a.values, a.values, square * a.scale * a.scale, out)
    mean = constant + linear * a.mean + square * a.mean * a.mean
    return Centered(mean + w.scale * _center(out), w.scale, out)


def norm_of(a: Centered, w: Centered, triple: Triple) -> float:
    """Return the Frobenius norm of a Gram matrix, from the trace that its square has left in `W`.

    Args:
        a: the Gram matrix.
        w: the polynomial in it.
        triple: of which coefficients.
    """
    constant, linear, square = triple
    if square == 0.0:
        return math.inf
    of_squares = (w.mean - constant - linear * a.mean) / square  # the mean of the diagonal of A^2
    return math.sqrt(of_squares * a.values.shape[-1]) if of_squares > 0.0 else math.inf


def accumulate(a: Centered, w: Centered, triples: Sequence[Triple], workspace: Workspace) -> Centered:
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
            q = _product(q, w, take(f"q{step % 2}", a.values, workspace))
        if step < len(triples) - 1:
            a = _product(a, _squared(w, workspace), take(f"a{step % 2}", a.values, workspace))
    return q


def apply(q: Centered, x: Scaled, out: torch.Tensor) -> Scaled:
    """Return `Q X`, or `X Q` where `X` has more rows than columns.

    The mean eigenvalue goes back onto the diagonal, so that one product without a base does it. What rounding the
    diagonal does to all eigenvalues alike is taken back by the factor.

    Args:
        q: what is applied; used up.
        x: the matrix.
        out: where the result goes.
    """
    values, scale = q.values, q.scale
    if q.mean != 0.0 and math.isfinite(scale) and scale != 0.0:
        scale *= _put_back(values, q.mean / scale)
    left, right = (x.values, values) if has_more_rows(x.values) else (values, x.values)
    return Scaled(torch.matmul(left, right, out=out), scale * x.scale)


def _put_back(matrix: torch.Tensor, mean: float) -> float:
    """Add a mean to the diagonal of a matrix of zero trace, and return the factor on it that makes the mean exact."""
    diagonal = matrix.diagonal()
    diagonal.copy_(diagonal.to(torch.promote_types(matrix.dtype, torch.float32)).add_(mean))
    stored = float(diagonal.to(torch.promote_types(matrix.dtype, torch.float32)).sum()) / matrix.shape[-1]
    return mean / stored if stored else 1.0


def _squared(w: Centered, workspace: Workspace) -> Centered:
    out = take("w2", w.values, workspace)
    square = _sum(w.values, 2.0 * w.mean * w.scale, w.values, w.values, w.scale * w.scale, out)
    return Centered(w.mean * w.mean + square.scale * _center(out), square.scale, out)


def _product(left: Centered, right: Centered, out: torch.Tensor) -> Centered:
    """Return the product of two matrices that commute."""
    both = left.scale * right.scale
    terms = [(left.scale * right.mean, left.values), (right.scale * left.mean, right.values)]
    (beta, base), (less, added) = sorted(terms, key=lambda term: -abs(term[0]))
    if beta == 0.0:
        product = Scaled(torch.mm(left.values, right.values, out=out), both)
    else:
        torch.add(base, added, alpha=less / beta, out=out)
        product = Scaled(out.addmm_(left.values, right.values, alpha=both / beta), beta)
    return Centered(left.mean * right.mean + product.scale * _center(out), product.scale, out)


def _sum(
    base: torch.Tensor, beta: float, left: torch.Tensor, right: torch.Tensor, alpha: float, out: torch.Tensor
) -> Scaled:
    """Return `beta * base + alpha * left @ right`, by a product that adds the base once or not at all."""
    if beta == 0.0:
        return Scaled(torch.matmul(left, right, out=out), alpha)
    multiply = torch.baddbmm if base.dim() == 3 else torch.addmm
    return Scaled(multiply(base, left, right, beta=1, alpha=alpha / beta, out=out), beta)


def _center(matrix: torch.Tensor) -> float:
    """Subtract the mean of the diagonal from it, in place, and return the mean."""
    diagonal = matrix.diagonal()
    wide = diagonal.to(torch.promote_types(matrix.dtype, torch.float32))
    mean = float(wide.sum()) / matrix.shape[-1]
    diagonal.copy_(wide.sub_(mean))  # in 16 bits the mean itself would be rounded, alike for all elements
    return mean
