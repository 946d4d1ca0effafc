"""The two bases that a matrix is rotated into, and the Kronecker factors that they come from."""

from __future__ import annotations

import torch
from attrs import frozen

from megaopt_soap.basis import eigenbasis, orthonormal_rows, rotated_eigenvalues
from megaopt_soap.symmetric import accumulate_gram, completed

__all__ = ["Rotation", "Side"]


@frozen(eq=False)
class Side:
    """What is kept of the rows of a matrix, or of its columns; every tensor is updated in place.

    Args:
        factor: Kronecker factor, `[n, n]`, symmetric; between refreshes only its upper triangle is up to date.
        basis: its eigenvectors as rows, `[n, n]`.
        eigenvalues: `[n]`, of the factor in that basis; None without KL-Shampoo.
    """

    factor: torch.Tensor
    basis: torch.Tensor
    eigenvalues: torch.Tensor | None = None

    def whitening(self, eps: float) -> torch.Tensor:
        r"""Return :math:`1 / \sqrt{n \max(\lambda, \epsilon)}`, `[n]`.

        Args:
            eps: the least eigenvalue that is divided by.
        """
        assert self.eigenvalues is not None  # noqa: S101 - only asked for KL-Shampoo
        return self.eigenvalues.clamp_min(eps).mul_(len(self.basis)).rsqrt_()

    def start(self) -> None:
        """Set the basis by an eigendecomposition of the factor."""
        self.basis.copy_(eigenbasis(completed(self.factor)))
        self._estimate()

    def refresh(self) -> torch.Tensor:
        """Improve the basis by one step of power iteration.

        Returns:
            `[n]`: where each eigenvector that is improved was before; they are sorted by their eigenvalues first.
        """
        image = self.basis @ completed(self.factor)
        order = rotated_eigenvalues(self.basis, image).argsort(descending=True, stable=True)
        self.basis.copy_(orthonormal_rows(image.index_select(0, order)))
        self._estimate()
        return order

    def _estimate(self) -> None:
        if self.eigenvalues is not None:
            self.eigenvalues.copy_(rotated_eigenvalues(self.basis, self.basis @ self.factor))


@frozen(eq=False)
class Rotation:
    """The bases of one matrix; a side without one stays as it is.

    Args:
        left: of the rows.
        right: of the columns.

    Example:
        >>> swap = Side(torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> rotation = Rotation(swap, None)
        >>> rotation.apply(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [[3.0, 4.0], [1.0, 2.0]]
    """

    left: Side | None
    right: Side | None

    def apply(self, matrix: torch.Tensor) -> torch.Tensor:
        r"""Return :math:`Q_L X Q_R^\top`.

        Args:
            matrix: `X`, `[rows, columns]`.
        """
        if self.left is not None:
            matrix = self.left.basis @ matrix
        return matrix if self.right is None else matrix @ self.right.basis.mT

    def undo(self, matrix: torch.Tensor) -> torch.Tensor:
        r"""Return :math:`Q_L^\top X Q_R`.

        Args:
            matrix: `X`, `[rows, columns]`.
        """
        if self.left is not None:
            matrix = self.left.basis.mT @ matrix
        return matrix if self.right is None else matrix @ self.right.basis

    def undo_into(self, target: torch.Tensor, matrix: torch.Tensor, *, keep: float, alpha: float) -> None:
        r"""Compute :math:`P \leftarrow \kappa P + \alpha Q_L^\top X Q_R` in place.

        Args:
            target: `P`, `[rows, columns]`, of any floating-point dtype.
            matrix: `X`, of the same shape.
            keep: factor on `P`.
            alpha: factor on the rotated `X`.
        """
        if self.right is None or target.dtype != matrix.dtype:
            target.mul_(keep).add_(self.undo(matrix).to(target.dtype), alpha=alpha)
            return
        if self.left is not None:
            matrix = self.left.basis.mT @ matrix
        target.addmm_(matrix, self.right.basis, beta=keep, alpha=alpha)

    def accumulate(
        self, grad: torch.Tensor, weight: float, eps: float, *, plain: bool, rotate: bool
    ) -> torch.Tensor | None:
        """Take a gradient into the factors.

        With KL-Shampoo each factor takes what the other one's inverse makes of the gradient. A matrix with one basis
        only has no other factor.

        Args:
            grad: `[rows, columns]`.
            weight: share of this gradient in the factors.
            eps: the least eigenvalue that is divided by.
            plain: take it as without KL-Shampoo.
            rotate: the bases stay as they are in this step, and the rotated gradient is wanted.

        Returns:
            The rotated gradient, if it is wanted.
        """
        left, right = self.left, self.right
        if plain or left is None or right is None or left.eigenvalues is None or right.eigenvalues is None:
            if left is not None:
                accumulate_gram(left.factor, grad, weight)
            if right is not None:
                accumulate_gram(right.factor, grad.mT, weight)
            return self.apply(grad) if rotate else None
        on_right, on_left = grad @ right.basis.mT, left.basis @ grad
        by_column, by_row = right.whitening(eps), left.whitening(eps)[:, None]
        accumulate_gram(left.factor, on_right * by_column, weight)
        accumulate_gram(right.factor, (on_left * by_row).mT, weight)
        if not rotate:
            return None
        rotated = on_left @ right.basis.mT
        # In bases that stay, each eigenvalue follows its own row or column.
        left.eigenvalues.lerp_((rotated * by_column).square_().sum(dim=1), weight)
        right.eigenvalues.lerp_((rotated * by_row).square_().sum(dim=0), weight)
        return rotated

    def refresh(self, exp_avg_sq: torch.Tensor, *, first: bool) -> None:
        """Set the bases anew, and let the second moment follow the order of the eigenvectors.

        Args:
            exp_avg_sq: `[rows, columns]` in the old bases; updated in place.
            first: there was no basis before.
        """
        for dim, side in enumerate((self.left, self.right)):
            if side is None:
                continue
            if first:
                side.start()
            else:
                exp_avg_sq.copy_(exp_avg_sq.index_select(dim, side.refresh()))
