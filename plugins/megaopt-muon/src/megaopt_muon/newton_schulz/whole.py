r"""Newton-Schulz in products whose `beta` never changes, for matrices of 16 bits on a processor.

oneDNN compiles a kernel for every value of `beta` in `beta * C + alpha * A B`, and takes `alpha` as it comes. Numbers
that depend on the data are therefore kept beside the matrices, and reach them through `alpha` alone:

.. math:: \beta C + \alpha A B = \beta \, (C + \tfrac{\alpha}{\beta} A B)

of which the factor outside joins the scale of the result. Nothing is multiplied only to be scaled: the norm of what
came is a scale from the beginning, and the scale of the result goes into the update of the parameter.

So the products of all steps with `X` share a kernel. Those of Gram matrices have one for each of the few steps: these
are not scaled, since the diagonal of a matrix whose singular values are 1 would no longer be what 16 bits hold exactly.
Their `beta`, of coefficients alone, takes up what is known beforehand, so that the products with `X` have an `alpha` of
1, which takes a little less time.

A product with an addend copies it first and reads it again. Large matrices have none: a multiple of the identity is
added to diagonals, whose rounding :mod:`megaopt_muon.newton_schulz.exact` keeps account of.

.. math::
    W = a I + b A + c A^2, \qquad Q \leftarrow Q W, \qquad A \leftarrow A W^2, \qquad X \leftarrow Q X
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch

from megaopt_muon.choice.growth import are_tame
from megaopt_muon.choice.schedule import are_gentle
from megaopt_muon.newton_schulz.exact import (
    Triple,
    accumulate,
    apply,
    first_polynomial,
    gram_of,
    polynomial,
    single_polynomial,
)
from megaopt_muon.newton_schulz.scaled import Scaled, has_more_rows, squared_norm, take
from megaopt_muon.products.narrow import commuting, outer, outer_memory, product

if TYPE_CHECKING:
    from megaopt_muon.products.workspace import Workspace

__all__ = ["ChooseRuns", "iterate_whole"]

type ChooseRuns = Callable[[float], Sequence[int]]
"""Frobenius norm of the Gram matrix of a matrix of norm 1, to the lengths of the runs."""

_FEW: Final = 2
"""Runs that are made on a tall matrix as it is."""

_WITHOUT_ADDEND: Final = 600
"""Rows from which on single steps multiply without addends."""

_QUARTER: Final = 0.25
"""Share of a first Gram matrix that is made where later ones have a scale: one of 1 would need a kernel of its own."""

_FAR: Final = 1e6
"""Growth that is not kept beside a matrix of norm 1e-10, whose squares are to stay in the range of bfloat16."""


def iterate_whole(
    x: Scaled,
    coefficients: Sequence[Triple],
    workspace: Workspace,
    choose: ChooseRuns | None = None,
    reduce: Callable[[torch.Tensor], None] | None = None,
    factor: float = 1.0,
) -> Scaled:
    """Run all steps on matrices of norm at most 1, or of norm 1 where runs are chosen.

    Products that read a left operand across take longer, and so does turning a tall matrix around and back: a single
    one is turned where more than two runs are left, small ones in batches never.

    Args:
        x: `[n, k]` or `[matrices, n, k]`; used up.
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
    if reduce is None and x.values.dim() == 2 and has_more_rows(x.values) and len(runs) > _FEW:
        turned = x.values.mT.shape
        memory = workspace.take("turned", turned, x.values.dtype, x.values.device, dense=True)
        x = Scaled(memory.copy_(x.values.mT), x.scale)
        free = free.view(turned)
    singles = _SingleSteps(x, coefficients, workspace, reduce)
    for length in runs:
        triples = coefficients[done : done + length]
        done += length
        last = factor if done == len(coefficients) else 1.0
        if length == 1:
            x, free = singles(x, triples[0], free, last), x.values
        else:
            a = gram_of(x, x.scale * x.scale * squared_norm(x.values, workspace), workspace)
            w = polynomial(a, triples[0], take("w0", a.values, workspace))
            q = accumulate(a, w, triples, workspace)
            x, free = apply(q, x, free, last, tall=has_more_rows(x.values)), x.values
    if x.values.shape != shape:
        x = Scaled(free.view(shape).copy_(x.values.mT), x.scale)
    return x


class _SingleSteps:
    """Steps `a X + (b A + c A^2) X`.

    Args:
        x: tells shape, dtype and device.
        coefficients: of all steps.
        workspace: where intermediate matrices live.
        reduce: sums a Gram matrix over ranks.
    """

    def __init__(
        self,
        x: Scaled,
        coefficients: Sequence[Triple],
        workspace: Workspace,
        reduce: Callable[[torch.Tensor], None] | None,
    ) -> None:
        values = x.values
        self._reduce = reduce
        self._tall = reduce is None and has_more_rows(values)
        self._gram = outer_memory(values, workspace, tall=self._tall)
        self._w = take("w0", self._gram, workspace)
        # Small products with an addend take less time than what the diagonals of others do.
        alone = values.dim() == 2 and min(values.shape) >= _WITHOUT_ADDEND
        self._gentle = alone and are_gentle(tuple(coefficients))
        # Where all steps have one `a`, nothing is to be shared.
        self._keeps = are_tame(tuple(coefficients)) and len({a for a, _, _ in coefficients}) > 1
        self._kept = 1.0

    def __call__(self, x: Scaled, triple: Triple, out: torch.Tensor, factor: float) -> Scaled:
        """Return the step times a factor.

        Args:
            x: the matrix, or a batch.
            triple: `(a, b, c)`.
            out: where the result goes.
            factor: on the result.
        """
        (a, b, c), gram, w = triple, self._gram, self._w
        square = x.scale * x.scale
        share = _QUARTER if self._keeps and square == 1.0 and not self._gentle else 1.0
        outer(x.values, square * share, gram, tall=self._tall)
        if self._reduce is not None:
            self._reduce(gram)
        left, right = (x.values, w) if self._tall else (w, x.values)
        if self._gentle and c != 0.0:
            factor *= x.scale * single_polynomial(gram, triple, w)
            return Scaled(product(left, right, factor, out))
        outside = a if self._keeps and 0.0 < abs(self._kept * a) < _FAR else 1.0
        self._kept *= outside
        commuting(gram, gram, c / (outside * share * share), w, gram, b / (outside * share))
        result = product(left, right, 1.0, out, x.values, a / outside)
        return Scaled(result, factor * x.scale * outside)
