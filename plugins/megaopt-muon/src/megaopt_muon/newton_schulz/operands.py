"""The matrix that an iteration in 32 or 64 bits works on, and how it meets the small matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from megaopt_muon.newton_schulz.gram import scaled_product, whole_steps
from megaopt_muon.products.onednn import column_blocks, joined_columns, next_blocks, with_product
from megaopt_muon.products.panels import SymmetricMatrix
from megaopt_muon.products.symmetric import Scalar, gram_matrix, gram_of_columns

if TYPE_CHECKING:
    from megaopt_muon.coefficients import Coefficients
    from megaopt_muon.products.workspace import Workspace

__all__ = ["Columns", "Operand", "Whole"]


class Operand(Protocol):
    """A matrix, or a batch, in whatever form its products want it."""

    @property
    def size(self) -> int:
        """Rows of the small matrices."""

    def gram(self, out: SymmetricMatrix) -> None:
        """Compute the Gram matrix.

        Args:
            out: where it goes.
        """

    def apply(self, q: Scalar, m: torch.Tensor) -> None:
        """Become `(q I + m) X`, or `X (q I + m)` for a tall matrix.

        Args:
            q: the multiple of the identity.
            m: the rest.
        """

    def run_steps(self, gram: SymmetricMatrix, m: torch.Tensor, coefficients: Coefficients) -> None:
        """Run all steps one by one, each in three whole products: small matrices, where calls count.

        Args:
            gram: the Gram matrix; used up.
            m: memory of the same shape.
            coefficients: `(a, b, c)` of each step.
        """

    def result(self) -> torch.Tensor:
        """Return the matrix, of its shape at the beginning."""


class Whole:
    """One tensor, multiplied by the library that torch multiplies with.

    Args:
        x: `[rows, columns]` or `[matrices, rows, columns]`; used up.
        tall: the Gram matrix is `X^T X`.
        workspace: where what is multiplied goes.
    """

    def __init__(self, x: torch.Tensor, workspace: Workspace, *, tall: bool) -> None:
        self._x, self._tall = x, tall
        self._other = workspace.take("x", x.shape, x.dtype, x.device)
        self.size = x.shape[-1] if tall else x.shape[-2]

    def gram(self, out: SymmetricMatrix) -> None:
        """Compute the Gram matrix."""
        gram_matrix(self._x, out, tall=self._tall)

    def apply(self, q: Scalar, m: torch.Tensor) -> None:
        """Become the product."""
        self._x, self._other = (
            scaled_product(q, m, self._x, tall=self._tall, out=self._other),
            self._x,
        )

    def run_steps(self, gram: SymmetricMatrix, m: torch.Tensor, coefficients: Coefficients) -> None:
        """Run all steps one by one."""
        self._x = whole_steps(self._x, self._other, gram.values, m, coefficients, tall=self._tall)

    def result(self) -> torch.Tensor:
        """Return the matrix."""
        return self._x


class Columns:
    """Blocks of columns of one wide matrix, multiplied by oneDNN; a tall one is turned around.

    Args:
        x: `[rows, columns]`; used up.
        tall: the Gram matrix is `X^T X`.
    """

    def __init__(self, x: torch.Tensor, *, tall: bool) -> None:
        self._x, self._tall = x, tall
        self._blocks = column_blocks(x.mT if tall else x)
        self.size = self._blocks[0].shape[0]

    def gram(self, out: SymmetricMatrix) -> None:
        """Compute the Gram matrix, of a large one block row by block row."""
        gram_of_columns(self._blocks, out)

    def apply(self, q: Scalar, m: torch.Tensor) -> None:
        """Become the product, one block after the other, which stays in the cache."""
        self._blocks = [with_product(float(q), m, block) for block in self._blocks]

    def run_steps(self, gram: SymmetricMatrix, m: torch.Tensor, coefficients: Coefficients) -> None:
        """Run all steps one by one, each in new memory, which is small."""
        del m
        for number, triple in enumerate(coefficients):
            self._blocks = next_blocks(self._blocks, triple, None if number else gram.values)

    def result(self) -> torch.Tensor:
        """Return the matrix."""
        joined_columns(self._blocks, self._x.mT if self._tall else self._x)
        return self._x
