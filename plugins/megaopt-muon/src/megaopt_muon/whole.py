r"""Newton-Schulz in products whose `beta` never changes, for matrices of 16 bits on a processor.

oneDNN compiles a kernel for every value of `beta` in `beta * C + alpha * A B`, and takes `alpha` as it comes. Numbers
that depend on the data are therefore kept beside the matrices, and reach them through `alpha` alone:

.. math:: \beta C + \alpha A B = \beta \, (C + \tfrac{\alpha}{\beta} A B)

of which the factor outside joins the scale of the result. Nothing is multiplied only to be scaled: the norm of what
came is a scale from the beginning, and the scale of the result goes into the update of the parameter.

A run of several steps holds each Gram matrix, each polynomial in it and their product as :math:`\pi I + f P` with `P`
of zero trace (:mod:`megaopt_muon.gram` tells why), the numbers `pi` and `f` apart:

.. math::
    W = a I + b A + c A^2, \qquad Q \leftarrow Q W, \qquad A \leftarrow A W^2, \qquad X \leftarrow Q X
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import frozen

if TYPE_CHECKING:
    from megaopt_muon.workspace import Workspace

__all__ = ["ChooseRuns", "Scaled", "iterate_whole", "squared_norm"]

type ChooseRuns = Callable[[float], Sequence[int]]
"""Frobenius norm of the Gram matrix of a matrix of norm 1, to the lengths of the runs."""

type Triple = tuple[float, float, float]

_FEW = 2
"""Runs that are made on a tall matrix as it is."""

_IN_CACHE = 1 << 17
"""Elements that are widened at a time: they stay in the cache of a core."""


@frozen(eq=False)
class Scaled:
    """`scale * values`.

    Args:
        values: a matrix, or a batch.
        scale: the factor.
    """

    values: torch.Tensor
    scale: float = 1.0


@frozen(eq=False)
class _Centered:
    """`mean * I + scale * values`, where `values` has zero trace."""

    mean: float
    scale: float
    values: torch.Tensor


def iterate_whole(
    x: Scaled,
    coefficients: Sequence[Triple],
    workspace: Workspace,
    choose: ChooseRuns | None = None,
    reduce: Callable[[torch.Tensor], None] | None = None,
) -> Scaled:
    """Run all steps on matrices of norm at most 1, or of norm 1 where runs are chosen.

    Products that read a left operand across take longer, and so does turning a tall matrix around and back: it is
    turned where more than two runs are left.

    Args:
        x: `[n, k]` or `[matrices, n, k]`, of which a batch is not tall; used up.
        coefficients: `(a, b, c)` of each step.
        workspace: where intermediate matrices live.
        choose: tells the runs that the Gram matrix's norm allows; None for single steps.
        reduce: sums a Gram matrix over the ranks that hold parts of `x`, in place; for single steps. The sum is that of
            `X X^T`, whatever shape a part has.

    Returns:
        The result, in memory that the next call uses again.
    """
    shape = x.values.shape
    done, runs = 0, [1] * len(coefficients)
    if choose is not None:
        a = _gram(x, 1.0, workspace)
        w = _polynomial(a, coefficients[0], _take("w0", a.values, workspace))
        runs = list(choose(_norm(a, w, coefficients[0])))
        q = _accumulate(a, w, coefficients[: runs[0]], workspace)
        free = x.values
        x = _apply(q, x, _take("x", x.values, workspace))
        done, runs = runs[0], runs[1:]
    else:
        free = _take("x", x.values, workspace)
    if reduce is None and _is_tall(x.values) and len(runs) > _FEW:
        turned = x.values.mT.shape
        memory = workspace.take("turned", turned, x.values.dtype, x.values.device, dense=True)
        x = Scaled(memory.copy_(x.values.mT), x.scale)
        free = free.view(turned)
    for length in runs:
        triples = coefficients[done : done + length]
        if length == 1:
            x, free = _single(x, triples[0], free, workspace, reduce), x.values
        else:
            a = _gram(x, x.scale * x.scale * squared_norm(x.values, workspace), workspace)
            w = _polynomial(a, triples[0], _take("w0", a.values, workspace))
            x, free = _apply(_accumulate(a, w, triples, workspace), x, free), x.values
        done += length
    if x.values.shape != shape:
        x = Scaled(free.view(shape).copy_(x.values.mT), x.scale)
    return x


def squared_norm(x: torch.Tensor, workspace: Workspace) -> float:
    """Return the squared Frobenius norm of a matrix of 16 bits, summed in more.

    Args:
        x: a contiguous tensor.
        workspace: where pieces of it are widened.
    """
    flat = x.view(-1)
    buffer = workspace.take("wide", (min(_IN_CACHE, flat.numel()),), torch.float32, x.device)
    total = 0.0
    for piece in flat.split(_IN_CACHE):
        wide = buffer[: piece.numel()].copy_(piece)
        total += float(torch.dot(wide, wide))
    return total


def _single(
    x: Scaled,
    triple: Triple,
    out: torch.Tensor,
    workspace: Workspace,
    reduce: Callable[[torch.Tensor], None] | None,
) -> Scaled:
    """Return `a X + (b A + c A^2) X`."""
    a, b, c = triple
    tall = reduce is None and _is_tall(x.values)
    gram = _outer(x.values, x.scale * x.scale, workspace, tall=tall)
    if reduce is not None:
        reduce(gram)
    w = _take("w0", gram, workspace)
    multiply = torch.baddbmm if gram.dim() == 3 else torch.addmm
    multiply(gram, gram, gram, beta=b, alpha=c, out=w)  # the coefficients are few: each is compiled once
    left, right = (x.values, w) if tall else (w, x.values)
    return Scaled(multiply(x.values, left, right, beta=a, out=out), x.scale)


def _gram(x: Scaled, trace: float, workspace: Workspace) -> _Centered:
    """Return `X X^T`, whose trace is known more exactly than its rounded diagonal tells.

    Where singular values are nearly equal, so are the elements of the diagonal, which then round all the same way.
    """
    gram = _outer(x.values, 1.0, workspace, tall=_is_tall(x.values))
    _center(gram)
    return _Centered(trace / gram.shape[-1], x.scale * x.scale, gram)


def _polynomial(a: _Centered, triple: Triple, out: torch.Tensor) -> _Centered:
    """Return `W = a I + b A + c A^2`."""
    constant, linear, square = triple
    beta = (linear + 2.0 * square * a.mean) * a.scale
    w = _sum(a.values, beta, a.values, a.values, square * a.scale * a.scale, out)
    mean = constant + linear * a.mean + square * a.mean * a.mean
    return _Centered(mean + w.scale * _center(out), w.scale, out)


def _norm(a: _Centered, w: _Centered, triple: Triple) -> float:
    """Return the Frobenius norm of a Gram matrix, from the trace that its square has left in `W`."""
    constant, linear, square = triple
    if square == 0.0:
        return math.inf
    of_squares = (w.mean - constant - linear * a.mean) / square  # the mean of the diagonal of A^2
    return math.sqrt(of_squares * a.values.shape[-1]) if of_squares > 0.0 else math.inf


def _accumulate(a: _Centered, w: _Centered, triples: Sequence[Triple], workspace: Workspace) -> _Centered:
    """Return `Q` of several steps, of which `w` is the first one's polynomial."""
    q = w
    for step, triple in enumerate(triples):
        if step:
            w = _polynomial(a, triple, _take("w1", a.values, workspace))
            q = _product(q, w, _take(f"q{step % 2}", a.values, workspace))
        if step < len(triples) - 1:
            a = _product(a, _squared(w, workspace), _take(f"a{step % 2}", a.values, workspace))
    return q


def _squared(w: _Centered, workspace: Workspace) -> _Centered:
    out = _take("w2", w.values, workspace)
    square = _sum(w.values, 2.0 * w.mean * w.scale, w.values, w.values, w.scale * w.scale, out)
    return _Centered(w.mean * w.mean + square.scale * _center(out), square.scale, out)


def _product(left: _Centered, right: _Centered, out: torch.Tensor) -> _Centered:
    """Return the product of two matrices that commute."""
    both = left.scale * right.scale
    terms = [(left.scale * right.mean, left.values), (right.scale * left.mean, right.values)]
    (beta, base), (less, added) = sorted(terms, key=lambda term: -abs(term[0]))
    if beta == 0.0:
        product = Scaled(torch.mm(left.values, right.values, out=out), both)
    else:
        torch.add(base, added, alpha=less / beta, out=out)
        product = Scaled(out.addmm_(left.values, right.values, alpha=both / beta), beta)
    return _Centered(left.mean * right.mean + product.scale * _center(out), product.scale, out)


def _apply(q: _Centered, x: Scaled, out: torch.Tensor) -> Scaled:
    """Return `Q X`, or `X Q` for a tall matrix."""
    left, right = (x.values, q.values) if _is_tall(x.values) else (q.values, x.values)
    return _sum(x.values, q.mean * x.scale, left, right, q.scale * x.scale, out)


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


def _take(name: str, like: torch.Tensor, workspace: Workspace) -> torch.Tensor:
    return workspace.take(name, like.shape, like.dtype, like.device, dense=True)


def _outer(x: torch.Tensor, factor: float, workspace: Workspace, *, tall: bool) -> torch.Tensor:
    """Return `factor * X X^T`, or `factor * X^T X` for a tall matrix, rounded once."""
    size = x.shape[-1] if tall else x.shape[-2]
    out = workspace.take("gram", (*x.shape[:-2], size, size), x.dtype, x.device, dense=True)
    left, right = (x.mT, x) if tall else (x, x.mT)
    if factor == 1.0:
        return torch.matmul(left, right, out=out)
    multiply = torch.baddbmm if x.dim() == 3 else torch.addmm
    return multiply(out, left, right, beta=0, alpha=factor, out=out)


def _is_tall(x: torch.Tensor) -> bool:
    return x.shape[-2] > x.shape[-1]
