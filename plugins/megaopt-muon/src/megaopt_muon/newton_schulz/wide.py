"""Newton-Schulz in 32 or 64 bits, and in 16 on an accelerator: step by step, or in runs on the Gram matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megaopt_muon.choice.schedule import plan_blocks
from megaopt_muon.choice.spectrum import Spectrum, spectrum_of
from megaopt_muon.newton_schulz.gram import accumulate
from megaopt_muon.newton_schulz.operands import Columns, Operand, Whole
from megaopt_muon.products.panels import SymmetricMatrix
from megaopt_muon.products.symmetric import is_one_product, symmetric_product

if TYPE_CHECKING:
    from megaopt_muon.choice.methods import MethodBook
    from megaopt_muon.coefficients import Coefficients
    from megaopt_muon.products.workspace import Workspace

__all__ = ["iterate_wide"]


def iterate_wide(
    x: torch.Tensor,
    coefficients: Coefficients,
    workspace: Workspace,
    methods: str | MethodBook,
    *,
    tall: bool,
    reduce: Callable[[torch.Tensor], None] | None,
    relaxed: bool,
    onednn: bool,
) -> torch.Tensor:
    """Run all steps on normalized matrices.

    Args:
        x: `[rows, columns]` or `[matrices, rows, columns]`, of norm at most 1; used up.
        coefficients: `(a, b, c)` of each step.
        workspace: where intermediate matrices live.
        methods: what :func:`~megaopt_muon.choice.schedule.plan_blocks` is to do, or the book that chooses it.
        tall: iterate on `A = X^T X` instead of `A = X X^T`.
        reduce: sums a Gram matrix over the ranks that hold parts of `x`, in place.
        relaxed: float32 stands in for bfloat16.
        onednn: oneDNN multiplies; of one matrix.

    Returns:
        The result, in memory that the next call uses again.
    """
    small, large = (x.shape[-1], x.shape[-2]) if tall else (x.shape[-2], x.shape[-1])
    operand: Operand = Columns(x, tall=tall) if onednn else Whole(x, workspace, tall=tall)
    like = ((*x.shape[:-2], operand.size, operand.size), x.dtype, x.device)
    gram = workspace.take_symmetric("gram", *like, onednn=onednn, size=small if onednn else None)
    _begin(operand, gram, reduce)
    kind = {"relaxed": relaxed, "onednn": onednn}
    if isinstance(methods, str):
        method = methods
    else:
        known = x.dim() == 2 and x.device.type == "cpu" and reduce is None
        best = Spectrum.BOUNDED if known else Spectrum.UNKNOWN
        method = methods.wide_method_of(small, large, x.device, x.dtype, best, **kind)
    asked = method != "standard" and not relaxed and reduce is None
    spectrum = spectrum_of(gram.inner) if asked else Spectrum.UNKNOWN
    blocks = plan_blocks(method, coefficients, small, large, x.device, x.dtype, spectrum, **kind)
    if reduce is None and len(blocks) == len(coefficients) and is_one_product(gram):
        operand.run_steps(gram, workspace.take("m", *like), coefficients)
        return operand.result()
    done = 0
    for length in blocks:
        if done:
            _begin(operand, gram, reduce)
        steps = coefficients[done : done + length]
        several = length > 1
        q, m = accumulate(gram, steps, workspace) if several else _plain_step(gram, *steps[0], workspace)
        operand.apply(q, m)
        done += length
    return operand.result()


def _begin(operand: Operand, gram: SymmetricMatrix, reduce: Callable[[torch.Tensor], None] | None) -> None:
    """Compute the Gram matrix that a run begins at."""
    operand.gram(gram)
    if reduce is not None:
        reduce(gram.values)


def _plain_step(
    gram: SymmetricMatrix, a: float, b: float, c: float, workspace: Workspace
) -> tuple[float, torch.Tensor]:
    """Return `a` and `b A + c A^2`."""
    values = gram.values
    like = (values.shape, values.dtype, values.device)
    m = workspace.take_symmetric("m", *like, onednn=gram.onednn, size=gram.size)
    return a, symmetric_product(gram, gram, m, factor=c, plus_left=b).values
