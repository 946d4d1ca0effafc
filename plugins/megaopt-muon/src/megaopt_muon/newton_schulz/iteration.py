"""Newton-Schulz orthogonalization, iterated on the matrix or on its Gram matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from attrs import Factory, field, frozen

from megaopt_muon.choice.growth import are_tame, largest_norm
from megaopt_muon.choice.methods import MethodBook, is_narrow
from megaopt_muon.choice.schedule import are_measured, whole_runs
from megaopt_muon.newton_schulz.half import half_scale, iterate_half
from megaopt_muon.newton_schulz.norms import entered, normalized
from megaopt_muon.newton_schulz.scaled import Scaled
from megaopt_muon.newton_schulz.whole import iterate_whole
from megaopt_muon.newton_schulz.wide import iterate_wide
from megaopt_muon.products.hopper import kernel_share
from megaopt_muon.products.precision import at_least_float32, compute_dtype, matmul_precision
from megaopt_muon.products.symmetric import is_tall
from megaopt_muon.products.workspace import Workspace

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients

__all__ = ["NewtonSchulz"]

type Reduce = Callable[[torch.Tensor], None]


@frozen
class NewtonSchulz:
    r"""Orthogonalizes matrices by a fixed number of Newton-Schulz steps.

    With :math:`X = U / \max(\lVert U \rVert_F, \epsilon)`, every step is

    .. math:: A = X X^\top, \qquad X \leftarrow a X + (b A + c A^2) X

    (for tall matrices with :math:`A = X^\top X` from the right). Runs of steps are done on the small matrix `A` alone
    (:mod:`megaopt_muon.newton_schulz.gram`), where that is cheaper and as accurate
    (:mod:`megaopt_muon.choice.schedule`).

    Args:
        coefficients: `(a, b, c)` of each step.
        precision: `"medium"` computes in bfloat16, or in float32 on a processor that cannot multiply bfloat16, or on an
            accelerator in float16 (:mod:`megaopt_muon.newton_schulz.half`); `"high"` and `"highest"` in the input's
            precision, at least float32.
        method: `"standard"`, `"gram"`, or `"auto"`, which takes the cheaper for each shape.
        eps: least norm that an update is divided by.
        workspace: where intermediate matrices live between calls.
        book: the methods of matrices of 16 bits on a processor, chosen when a shape is first met.

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
    book: MethodBook = field(init=False, eq=False, repr=False)

    @book.default
    def _empty_book(self) -> MethodBook:
        dtype = compute_dtype(self.precision, torch.float32, torch.device("cpu"))
        return MethodBook(self.method, self.coefficients, narrow=dtype.itemsize == 2)

    def __call__(
        self, update: torch.Tensor, book: MethodBook | None = None, factor: float = 1.0
    ) -> torch.Tensor:
        """Return the orthogonalized matrices as a new tensor.

        Args:
            update: `[rows, columns]` or `[matrices, rows, columns]`, any floating-point dtype.
            book: the methods to take; None: this object's own.
            factor: on the result.

        Returns:
            The same shape, float32 (float64 for a float64 update under `"high"` and `"highest"`).
        """
        with matmul_precision(self.precision):
            result = self.scaled(update, book, factor=factor)
        wide = at_least_float32(result.values.dtype)
        return result.values.to(wide, copy=True, memory_format=torch.contiguous_format).mul_(result.scale)

    def scaled(
        self,
        update: torch.Tensor,
        book: MethodBook | None = None,
        *,
        consume: bool = False,
        square: float | None = None,
        factor: float = 1.0,
    ) -> Scaled:
        """Return the orthogonalized matrices times a factor, of which a scale is left to whoever uses them.

        Args:
            update: as for :meth:`__call__`.
            book: the methods to take; None: this object's own.
            consume: `update` may be overwritten.
            square: its squared Frobenius norm, where that is known.
            factor: on the result.

        Returns:
            Matrices in memory that the next call uses again; never a number that is not finite, if `update` has none.
        """
        dtype = compute_dtype(self.precision, update.dtype, update.device)
        if is_narrow(dtype, update.device):
            if update.dim() == 2:
                return self._whole(
                    update, dtype, book or self.book, consume=consume, square=square, factor=factor
                )
            x = torch.empty(update.shape, dtype=dtype, device=update.device)
            x = normalized(update, x, self.eps)
            return self.finite(self.batch(x), update).times(factor)
        runs = self.half_runs(update.shape, update.device, book)
        if runs:
            scale = half_scale(min(update.shape[-2:]))
            x = torch.empty(update.shape, dtype=torch.float16, device=update.device)
            normalized(update, x, self.eps, scale)
            o = iterate_half(x, self.coefficients, runs, scale, tall=is_tall(x))
            return Scaled(o, factor / scale)
        x = torch.empty(update.shape, dtype=dtype, device=update.device)
        normalized(update, x, self.eps)
        result = Scaled(self.iterate(x, tall=is_tall(x), book=book))
        return self.finite(result, update, book).times(factor)

    def is_half(self, device: torch.device) -> bool:
        """Return whether matrices are iterated in float16: on an accelerator, where nothing can blow up.

        Args:
            device: where they are.
        """
        return device.type != "cpu" and self.precision == "medium" and are_tame(self.coefficients)

    def half_runs(
        self, shape: Sequence[int], device: torch.device, book: MethodBook | None
    ) -> tuple[int, ...]:
        """Return the runs of matrices that are iterated in float16.

        Args:
            shape: `[*batch, rows, columns]`.
            device: where they are.
            book: the methods to take; None: this object's own.

        Returns:
            How many steps each run has; nothing where matrices are iterated in another dtype.
        """
        if not self.is_half(device):
            return ()
        small, large = sorted(shape[-2:])
        return (book or self.book).half_runs_of(small, large, kernel_share(device))

    def batch(self, x: torch.Tensor) -> Scaled:
        """Run all steps on normalized matrices of 16 bits on a processor.

        Args:
            x: `[matrices, rows, columns]`, of norm at most 1; used up.
        """
        return iterate_whole(Scaled(x), self.coefficients, self.workspace)

    def _whole(
        self,
        update: torch.Tensor,
        dtype: torch.dtype,
        book: MethodBook,
        *,
        consume: bool,
        square: float | None,
        factor: float,
    ) -> Scaled:
        """Orthogonalize one matrix in 16 bits."""
        small, large = sorted(update.shape)
        x = entered(
            update,
            dtype,
            self.workspace,
            self.eps,
            square=square,
            consume=consume and are_tame(self.coefficients),
        )
        runs = None
        if x.scale != 1.0 and book.method_of(small, large) == "gram":
            runs = partial(whole_runs, self.coefficients)
        if are_tame(self.coefficients):
            return iterate_whole(x, self.coefficients, self.workspace, runs, factor=factor)
        return self.finite(iterate_whole(x, self.coefficients, self.workspace, runs), update).times(factor)

    def finite(self, result: Scaled, update: torch.Tensor, book: MethodBook | None = None) -> Scaled:
        """Return the result, or what stands in for matrices that the iteration has blown up.

        Where rounding, or the coefficients themselves, drive a singular value away, the norm is larger than the
        coefficients allow, or not finite. A processor then iterates once more in float32. Where that is no better, and
        on an accelerator, which would have to wait for an answer, the normalized update stands in.

        Args:
            result: what the iteration gave.
            update: what it was given.
            book: the methods that it took, of matrices that are not of 16 bits.

        Returns:
            The result, to the bit, of every matrix that is not blown up.
        """
        if are_tame(self.coefficients):
            return result
        good = self._have_settled(result.values, result.scale)
        on_processor = update.device.type == "cpu"
        if on_processor and bool(good.all()):
            return result
        wide = torch.empty(update.shape, dtype=at_least_float32(update.dtype), device=update.device)
        normalized(update, wide, self.eps)
        values = result.values.to(wide.dtype, copy=on_processor)  # the iteration uses its memory again
        if on_processor:
            again = self.iterate(wide.clone(), tall=is_tall(wide), book=book).clone()
            wide = torch.where(self._have_settled(again), again, wide)
        if result.scale != 1.0:
            wide = wide.div_(result.scale)
        return Scaled(torch.where(good, values, wide), result.scale)

    def _have_settled(self, values: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return `[*batch, 1, 1]`: whether matrices are of a norm that the coefficients allow, and finite."""
        most = largest_norm(self.coefficients, *values.shape[-2:])
        wide = at_least_float32(values.dtype)
        if math.isinf(most):
            return values.sum(dim=(-2, -1), keepdim=True, dtype=wide).isfinite()
        # Adding up in more than 16 bits is what a processor does anyway, and faster where it is not asked for it.
        asked = None if values.device.type == "cpu" else wide
        norms: torch.Tensor = torch.linalg.vector_norm(values, dim=(-2, -1), keepdim=True, dtype=asked)
        return norms.to(wide) <= most / scale

    def iterate(
        self, x: torch.Tensor, *, tall: bool, reduce: Reduce | None = None, book: MethodBook | None = None
    ) -> torch.Tensor:
        """Run all steps on normalized matrices.

        Args:
            x: `[rows, columns]` or `[matrices, rows, columns]`, of norm at most 1, in the compute dtype; used up.
            tall: iterate on `A = X^T X` instead of `A = X X^T`.
            reduce: sums a Gram matrix over the ranks that hold parts of `x`, in place.
            book: the methods to take; None: what is cheapest here. Matrices of 16 bits on a processor go step by step.

        Returns:
            The result, in memory that the next call uses again.
        """
        if is_narrow(x.dtype, x.device):
            wide = x.mT.contiguous() if tall else x
            result = iterate_whole(Scaled(wide), self.coefficients, self.workspace, reduce=reduce)
            scaled = result.values.to(torch.float32).mul_(result.scale)
            return scaled.mT if tall else scaled
        small, large = (x.shape[-1], x.shape[-2]) if tall else (x.shape[-2], x.shape[-1])
        # Ranks that sum multiply as torch does: what one has measured is not known to all.
        onednn = reduce is None and (book or self.book).onednn_of(small, large, x.device, x.dtype)
        if onednn and x.dim() == 3:
            for matrix in x:
                matrix.copy_(self.iterate(matrix, tall=tall, book=book))
            return x
        # Long runs also enlarge what sums over ranks round differently.
        relaxed = reduce is None and self.stands_in(x.dtype)
        return iterate_wide(
            x,
            self.coefficients,
            self.workspace,
            self.method if book is None else book,
            tall=tall,
            reduce=reduce,
            relaxed=relaxed,
            onednn=onednn,
        )

    def stands_in(self, dtype: torch.dtype) -> bool:
        """Return whether a dtype stands in for bfloat16, with coefficients for which long runs there were measured.

        Args:
            dtype: that is computed in.
        """
        return self.precision == "medium" and dtype.itemsize > 2 and are_measured(self.coefficients)
