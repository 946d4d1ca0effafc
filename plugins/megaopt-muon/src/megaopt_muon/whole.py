r"""Newton-Schulz in products whose `beta` never changes, for matrices of 16 bits on a processor.

oneDNN compiles a kernel for every value of `beta` in `beta * C + alpha * A B`, and takes `alpha` as it comes. Numbers
that depend on the data are therefore kept beside the matrices, and reach them through `alpha` alone:

.. math:: \beta C + \alpha A B = \beta \, (C + \tfrac{\alpha}{\beta} A B)

of which the factor outside joins the scale of the result. Nothing is multiplied only to be scaled: the norm of what
came is a scale from the beginning, and the scale of the result goes into the update of the parameter.

A product with an addend copies it first and reads it again. There is none here: a multiple of the identity is added to
diagonals, whose rounding :mod:`megaopt_muon.exact` keeps account of.

.. math::
    W = a I + b A + c A^2, \qquad Q \leftarrow Q W, \qquad A \leftarrow A W^2, \qquad X \leftarrow Q X
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from megaopt_muon.exact import Triple, accumulate, apply, as_stored, first_polynomial, gram_of, polynomial
from megaopt_muon.norms import SMALLEST_ALONE
from megaopt_muon.scaled import Scaled, has_more_rows, outer, squared_norm, take
from megaopt_muon.schedule import are_gentle

if TYPE_CHECKING:
    from megaopt_muon.workspace import Workspace

__all__ = ["ChooseRuns", "iterate_whole"]

type ChooseRuns = Callable[[float], Sequence[int]]
"""Frobenius norm of the Gram matrix of a matrix of norm 1, to the lengths of the runs."""

_FEW = 2
"""Runs that are made on a tall matrix as it is."""


def iterate_whole(
    x: Scaled,
    coefficients: Sequence[Triple],
    workspace: Workspace,
    choose: ChooseRuns | None = None,
    reduce: Callable[[torch.Tensor], None] | None = None,
    factor: float = 1.0,
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
        factor: on the result, which the last product takes with it.

    Returns:
        The result, in memory that the next call uses again.
    """
    shape = x.values.shape
    # What the others of its shape become in batches, a small matrix becomes by itself.
    alone = len(shape) == 2 and min(shape) >= SMALLEST_ALONE
    gentle = alone and are_gentle(tuple(coefficients))
    done, runs = 0, [1] * len(coefficients)
    if choose is not None:
        a = gram_of(x, 1.0, workspace)
        w, norm = first_polynomial(a, coefficients[0], take("w0", a.values, workspace))
        runs = list(choose(norm))
        q = accumulate(a, w, coefficients[: runs[0]], workspace)
        free = x.values
        done, runs = runs[0], runs[1:]
        out = take("x", x.values, workspace, dense=True)
        x = apply(q, x, out, 1.0 if runs else factor, tall=has_more_rows(x.values))
    else:
        free = take("x", x.values, workspace, dense=True)
    if reduce is None and has_more_rows(x.values) and len(runs) > _FEW:
        turned = x.values.mT.shape
        memory = workspace.take("turned", turned, x.values.dtype, x.values.device, dense=True)
        x = Scaled(memory.copy_(x.values.mT), x.scale)
        free = free.view(turned)
    for length in runs:
        triples = coefficients[done : done + length]
        done += length
        last = factor if done == len(coefficients) else 1.0
        if length == 1:
            x, free = _single(x, triples[0], free, workspace, reduce, factor=last, gentle=gentle), x.values
        else:
            a = gram_of(x, x.scale * x.scale * squared_norm(x.values, workspace), workspace)
            w = polynomial(a, triples[0], take("w0", a.values, workspace))
            q = accumulate(a, w, triples, workspace)
            x, free = apply(q, x, free, last, tall=has_more_rows(x.values)), x.values
    if x.values.shape != shape:
        x = Scaled(free.view(shape).copy_(x.values.mT), x.scale)
    return x


def _single(
    x: Scaled,
    triple: Triple,
    out: torch.Tensor,
    workspace: Workspace,
    reduce: Callable[[torch.Tensor], None] | None,
    *,
    factor: float,
    gentle: bool,
) -> Scaled:
    """Return `factor` times `a X + (b A + c A^2) X`."""
    a, b, c = triple
    tall = reduce is None and has_more_rows(x.values)
    gram = outer(x.values, x.scale * x.scale, workspace, tall=tall)
    if reduce is not None:
        reduce(gram)
    w = take("w0", gram, workspace)
    if gentle:
        return apply(polynomial(as_stored(gram), triple, w), x, out, factor, tall=tall)
    multiply = torch.baddbmm if gram.dim() == 3 else torch.addmm
    multiply(gram, gram, gram, beta=b, alpha=c, out=w)  # the coefficients are few: each is compiled once
    left, right = (x.values, w) if tall else (w, x.values)
    return Scaled(multiply(x.values, left, right, beta=a, out=out), factor * x.scale)
