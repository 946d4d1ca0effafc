"""Newton-Schulz orthogonalization, iterated on the matrix or on its Gram matrix."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from attrs import Factory, field, frozen

from megaopt_muon.schedule import plan_blocks
from megaopt_muon.symmetric import symmetric_addmm, symmetric_mm
from megaopt_muon.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megaopt_muon.coefficients import Coefficients

__all__ = ["NewtonSchulz", "matmul_precision", "normalized"]

type Reduce = Callable[[torch.Tensor], None]


@contextmanager
def _precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    if before == name:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul_precision(name: str) -> AbstractContextManager[None]:
    """Return a context in which float32 products have this precision.

    Args:
        name: `"highest"`, `"high"` or `"medium"`, as for `torch.set_float32_matmul_precision`.
    """
    return _precision(name)


@frozen
class NewtonSchulz:
    r"""Orthogonalizes matrices by a fixed number of Newton-Schulz steps.

    With :math:`X_0 = U / \max(\lVert U \rVert_F, 10^{-7})`, every step is

    .. math:: A = X X^\top, \qquad X \leftarrow a X + (b A + c A^2) X

    (for tall matrices with :math:`A = X^\top X` from the right). Every step is a polynomial in the first :math:`A`,
    so that `k` steps can run on `n x n` matrices alone, `n` being the smaller dimension: with :math:`Z = b A + c A^2`,

    .. math:: Q \leftarrow Q (a I + Z), \qquad A \leftarrow (a I + Z) A (a I + Z)

    and :math:`X \leftarrow Q X` at the end of the block. `Q` is held as :math:`q I + M`, which keeps the large
    part of it free of rounding. Forgetting `A` and starting a new block restores the accuracy that squaring the
    singular values costs; which steps form a block is decided by :func:`megaopt_muon.schedule.plan_blocks`.

    Args:
        coefficients: `(a, b, c)` of each step.
        precision: `"medium"` computes in bfloat16; `"high"` and `"highest"` in the input's precision, at least float32.
        method: `"standard"`, `"gram"`, or `"auto"`, which takes the cheaper for each shape.
        workspace: where intermediate matrices live between calls.

    Source:
        Bernstein and Newhouse, "Old Optimizer, New Norm: An Anthology" (arXiv:2409.20325); K. Jordan et al., "Muon"
        (2024). The iteration on the Gram matrix is algebraically the same.

    Example:
        >>> ns = NewtonSchulz(((1.875, -1.25, 0.375),) * 12, precision="highest")
        >>> o = ns(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.1, 0.0]]))
        >>> torch.allclose(o @ o.mT, torch.eye(2), atol=1e-4)
        True
    """

    coefficients: Coefficients
    precision: str = "medium"
    method: str = "auto"
    workspace: Workspace = field(default=Factory(Workspace), eq=False, repr=False)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that inputs of `dtype` are iterated in.

        Args:
            dtype: of the update.
        """
        if self.precision == "medium":
            return torch.bfloat16
        return dtype if dtype in (torch.float32, torch.float64) else torch.float32

    def __call__(self, update: torch.Tensor) -> torch.Tensor:
        """Return the orthogonalized matrices as a new tensor.

        Args:
            update: `[rows, columns]` or `[matrices, rows, columns]`, any floating-point dtype.

        Returns:
            The same shape; bfloat16 under precision medium, else the input's precision, at least float32.
        """
        x = normalized(
            update, torch.empty(update.shape, dtype=self.compute_dtype(update.dtype), device=update.device)
        )
        tall = x.shape[-2] > x.shape[-1]
        with matmul_precision("high" if self.precision == "high" else "highest"):
            return self.iterate(x, tall=tall).clone()

    def iterate(self, x: torch.Tensor, *, tall: bool, reduce: Reduce | None = None) -> torch.Tensor:
        """Run all steps on normalized matrices.

        Args:
            x: `[rows, columns]` or `[matrices, rows, columns]`, of norm at most 1, in the compute dtype; used up.
            tall: iterate on :math:`X^\\top X` instead of :math:`X X^\\top`.
            reduce: sums a Gram matrix over the ranks that hold parts of `x`, in place.

        Returns:
            The result, in memory that the next call uses again.
        """
        small, large = (x.shape[-1], x.shape[-2]) if tall else (x.shape[-2], x.shape[-1])
        other = self.workspace.take("x", x.shape, x.dtype, x.device)
        done = 0
        for length in plan_blocks(self.method, self.coefficients, small, large, x.dtype):
            scale, accumulated = self._block(x, self.coefficients[done : done + length], tall, reduce)
            x, other = _apply(scale, accumulated, x, tall, other), x
            done += length
        return x

    def _block(
        self, x: torch.Tensor, coefficients: Coefficients, tall: bool, reduce: Reduce | None
    ) -> tuple[float, torch.Tensor]:
        """Return `q` and `M` such that `(q I + M) X` is `X` after these steps."""
        size = x.shape[-1] if tall else x.shape[-2]
        gram, z, m, spare = (
            self.workspace.take(name, (*x.shape[:-2], size, size), x.dtype, x.device)
            for name in ("gram", "z", "m", "spare")
        )
        symmetric_mm(x.mT if tall else x, x if tall else x.mT, out=gram)
        if reduce is not None:
            reduce(gram)
        q = 1.0
        for step, (a, b, c) in enumerate(coefficients):
            change = z if step else m
            symmetric_addmm(gram, gram, gram, beta=b, alpha=c, out=change)
            if step:
                torch.mul(m, a, out=spare).add_(change, alpha=q)
                symmetric_addmm(spare, m, change, beta=1.0, alpha=1.0, out=spare)
                m, spare = spare, m
            q *= a
            if step < len(coefficients) - 1:
                symmetric_addmm(gram, gram, change, beta=a, alpha=1.0, out=spare)
                symmetric_addmm(spare, spare, change, beta=a, alpha=1.0, out=gram)
        return q, m


def normalized(update: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Divide each matrix by its Frobenius norm, or by 1e-7 where that is larger.

    Args:
        update: `[*batch, rows, columns]`.
        out: where the result goes, of the same shape and any floating-point dtype.
    """
    # Squares of float32 overflow from 1e19 on; in float64 they do not.
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True, dtype=torch.float64).clamp_min_(1e-7)
    return torch.div(update, norm.to(torch.promote_types(update.dtype, torch.float32)), out=out)


def _apply(q: float, m: torch.Tensor, x: torch.Tensor, tall: bool, out: torch.Tensor) -> torch.Tensor:
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    left, right = (x, m) if tall else (m, x)
    return multiply(x, left, right, beta=q, alpha=1.0, out=out)
