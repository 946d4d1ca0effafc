"""Eigenbases of Kronecker factors: by eigendecomposition at first, by a step of power iteration later.

A basis is a square tensor whose rows are the eigenvectors, largest eigenvalue first.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["eigenbasis", "orthonormal_rows", "rotated_eigenvalues"]

_SMALLEST: Final = 256
"""Below this size LAPACK's QR is as fast as block rows."""
_HEIGHT: Final = 192
"""Rows of a block, as measured on one core with AVX-512."""
_INDEPENDENT: Final = 0.7
"""A row that keeps this part of its length has lost half a bit to cancellation."""


def eigenbasis(factor: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of a symmetric matrix as rows, largest eigenvalue first.

    Args:
        factor: `[n, n]`.

    Returns:
        `[n, n]`; NaN where the matrix is not finite. What float32 does not find is computed in float64; what that does
        not find either is the identity, in which SOAP steps as Adam does.

    Example:
        >>> eigenbasis(torch.diag(torch.tensor([1.0, 2.0]))).abs().tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    largest = factor.abs().max()
    if not torch.isfinite(largest):
        return torch.full_like(factor, torch.nan)
    vectors = _eigenvectors(factor)
    if vectors is None:
        vectors = _eigenvectors(factor.double() / largest.clamp_min(torch.finfo(factor.dtype).tiny).double())
    if vectors is None:
        return torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    rows: torch.Tensor = vectors.mT.flip(-2)
    return rows.to(factor.dtype).contiguous()


def _eigenvectors(factor: torch.Tensor) -> torch.Tensor | None:
    """Return the eigenvectors of a finite symmetric matrix as columns; None where they were not found.

    LAPACK's divide and conquer fails in float32 for one or two in a hundred matrices of low rank with rows of zeros, as
    features that never fire make them: it reports that, or returns NaN.
    """
    try:
        vectors: torch.Tensor = torch.linalg.eigh(factor).eigenvectors
    except RuntimeError:
        return None
    return vectors if torch.isfinite(vectors).all() else None


def rotated_eigenvalues(basis: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    r"""Return the diagonal of :math:`Q L Q^\top`, which approximates the eigenvalues.

    Args:
        basis: `Q`, `[n, n]`, eigenvectors as rows.
        image: `Q L`, `[n, n]`.
    """
    values: torch.Tensor = (basis * image).sum(dim=-1)
    return values


def orthonormal_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis whose first `k` rows span the first `k` rows given, for every `k`.

    That is the transposed orthogonal factor of the QR decomposition of the transpose, but for signs of rows. On a CPU
    it is computed by block Gram-Schmidt, each block by a Cholesky factor: products in place of Householder vectors. A
    block that loses length to those before it, or whose rows are nearly dependent, goes through both a second time.
    Where that does not help, the rows are dependent, and Householder vectors are taken.

    Args:
        rows: `[n, n]`, of full rank up to rounding.

    Example:
        >>> orthonormal_rows(torch.tensor([[2.0, 0.0], [1.0, 1.0]])).abs().tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if rows.device.type == "cpu" and rows.shape[0] >= _SMALLEST:
        basis = _block_gram_schmidt(rows)
        if basis is not None:
            return basis
    vectors, scales = torch.geqrf(rows.mT)
    orthogonal: torch.Tensor = torch.linalg.householder_product(vectors, scales)
    return orthogonal.mT.contiguous()


def _block_gram_schmidt(rows: torch.Tensor) -> torch.Tensor | None:
    basis = torch.empty_like(rows, memory_format=torch.contiguous_format)
    for start in range(0, len(rows), _HEIGHT):
        block, kept = _orthonormal_block(
            torch.nn.functional.normalize(rows[start : start + _HEIGHT]), basis[:start]
        )
        if not kept >= _INDEPENDENT:
            block, kept = _orthonormal_block(block, basis[:start])
            if not kept >= _INDEPENDENT:  # also where it is NaN
                return None
        basis[start : start + _HEIGHT] = block
    return basis


def _orthonormal_block(block: torch.Tensor, basis: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the block orthonormal and orthogonal to the basis, and the least part of its length that a row kept."""
    if len(basis):
        block = torch.addmm(block, block @ basis.mT, basis, alpha=-1.0)
    lengths = torch.linalg.vector_norm(block, dim=1, keepdim=True)
    block = block / lengths
    triangle, info = torch.linalg.cholesky_ex(block @ block.mT)
    if int(info):
        return block, 0.0
    kept = torch.minimum(lengths.min(), triangle.diagonal().min())
    return torch.linalg.solve_triangular(triangle, block, upper=False), float(kept)
