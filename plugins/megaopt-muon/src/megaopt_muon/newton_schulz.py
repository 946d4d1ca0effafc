"""Newton-Schulz orthogonalization, iterated on the matrix or on its Gram matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from attrs import Factory, field, frozen

from megaopt_muon.gram import accumulate, scaled_product
from megaopt_muon.mkl import has_triangles
from megaopt_muon.precision import compute_dtype, matmul_precision
from megaopt_muon.schedule import Spectrum, are_measured, plan_blocks, spectrum_of
from megaopt_muon.symmetric import SymmetricMatrix, block_height, gram_matrix, symmetric_product
from megaopt_muon.workspace import Workspace

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["NewtonSchulz", "is_tall", "normalized"]

type Reduce = Callable[[torch.Tensor], None]


@frozen
class NewtonSchulz:
    r"""Orthogonalizes matrices by a fixed number of Newton-Schulz steps.

    With :math:`X = U / \max(\lVert U \rVert_F, \epsilon)`, every step is

    .. math:: A = X X^\top, \qquad X \leftarrow a X + (b A + c A^2) X

    (for tall matrices with :math:`A = X^\top X` from the right). Runs of steps are done on the small matrix `A` alone
    (:mod:`megaopt_muon.gram`), where that is cheaper and as accurate (:mod:`megaopt_muon.schedule`).

    Args:
        coefficients: `(a, b, c)` of each step.
        precision: `"medium"` computes in bfloat16, or in float32 on a processor that cannot multiply bfloat16; `"high"`
            and `"highest"` in the input's precision, at least float32.
        method: `"standard"`, `"gram"`, or `"auto"`, which takes the cheaper for each shape.
        eps: least norm that an update is divided by.
        workspace: where intermediate matrices live between calls.

    Source:
        Bernstein and Newhouse, "Old Optimizer, New Norm: An Anthology" (arXiv:2409.20325); K. Jordan et al., "Muon"
        (2024).

    Example:
        >>> ns = NewtonSchulz(((1.875, -1.25, 0.375),) * 12, precision="highest")
        >>> o = ns(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
        >>> torch.allclose(o @ o.mT, torch.eye(2), atol=1e-4)
        True
    """

    coefficients: Coefficients
    precision: str = "medium"
    method: str = "auto"
    eps: float = 1e-15
    workspace: Workspace = field(default=Factory(Workspace), eq=False, repr=False)

    def __call__(self, update: torch.Tensor) -> torch.Tensor:
        """Return the orthogonalized matrices as a new tensor.

        Args:
            update: `[rows, columns]` or `[matrices, rows, columns]`, any floating-point dtype.

        Returns:
            The same shape, in the dtype that was computed in.
        """
        dtype = compute_dtype(self.precision, update.dtype, update.device)
        x = torch.empty(update.shape, dtype=dtype, device=update.device)
        normalized(update, x, self.eps)
        with matmul_precision(self.precision):
            return self.iterate(x, tall=is_tall(x)).clone()

    def iterate(self, x: torch.Tensor, *, tall: bool, reduce: Reduce | None = None) -> torch.Tensor:
        """Run all steps on normalized matrices.

        Args:
            x: `[rows, columns]` or `[matrices, rows, columns]`, of norm at most 1, in the compute dtype; used up.
            tall: iterate on `A = X^T X` instead of `A = X X^T`.
            reduce: sums a Gram matrix over the ranks that hold parts of `x`, in place.

        Returns:
            The result, in memory that the next call uses again.
        """
        small, large = (x.shape[-1], x.shape[-2]) if tall else (x.shape[-2], x.shape[-1])
        other = self.workspace.take("x", x.shape, x.dtype, x.device)
        gram = self.workspace.take_symmetric("gram", (*x.shape[:-2], small, small), x.dtype, x.device)
        gram_matrix(x, gram, tall=tall)
        if reduce is not None:
            reduce(gram.values)
        # Long runs also enlarge what sums over ranks round differently.
        stands_in = self.precision == "medium" and x.dtype.itemsize > 2 and reduce is None
        relaxed = stands_in and are_measured(self.coefficients)
        spectrum = Spectrum.UNKNOWN if relaxed or reduce is not None else spectrum_of(gram.values)
        done = 0
        for length in plan_blocks(
            self.method, self.coefficients, small, large, x.device, x.dtype, spectrum, relaxed=relaxed
        ):
            if done:
                gram_matrix(x, gram, tall=tall)
                if reduce is not None:
                    reduce(gram.values)
            steps = self.coefficients[done : done + length]
            q, m = (
                self._plain_step(gram, *steps[0]) if length == 1 else accumulate(gram, steps, self.workspace)
            )
            x, other = scaled_product(q, m, x, tall=tall, out=other), x
            done += length
        return x

    def _plain_step(self, gram: SymmetricMatrix, a: float, b: float, c: float) -> tuple[float, torch.Tensor]:
        """Return `a` and `b A + c A^2`."""
        values = gram.values
        m = self.workspace.take_symmetric("m", values.shape, values.dtype, values.device)
        return a, symmetric_product(gram, gram, m, factor=c, plus_left=b).values


def is_tall(x: torch.Tensor) -> bool:
    """Return whether `X^T X` is the cheaper of the two Gram matrices.

    Of a square matrix it is where block rows are multiplied in float32: there a transposed left operand costs less than
    a transposed right one. In MKL's triangles it is the other way round.

    Args:
        x: `[*batch, rows, columns]`.
    """
    rows, columns = x.shape[-2:]
    if rows != columns or x.dtype.itemsize == 2:
        return rows > columns
    kind = (rows, x.dtype, x.device)
    return block_height(*kind) < rows and not has_triangles(*kind)


def normalized(update: torch.Tensor, out: torch.Tensor, eps: float = 1e-15) -> torch.Tensor:
    """Divide each matrix by its Frobenius norm, or by `eps` where that is larger.

    Args:
        update: `[*batch, rows, columns]`.
        out: where the result goes, of the same shape and any floating-point dtype.
        eps: the least divisor.
    """
    if update.dim() == 2 and update.device.type == "cpu":
        # A sum in float32 is wrong by a few units, an error that all singular values share; bfloat16 does not notice.
        norm = torch.linalg.vector_norm(update).item() if out.dtype.itemsize == 2 else 0.0
        if not 1e-12 < norm < 1e12:  # or squares may have left float32's range
            norm = torch.linalg.vector_norm(update, dtype=torch.float64).item()
        return torch.div(update, norm if math.isnan(norm) else max(norm, eps), out=out)
    norms = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True, dtype=torch.float64).clamp_min_(eps)
    return torch.div(update, norms.to(torch.promote_types(update.dtype, torch.float32)), out=out)
