"""Bases and the products that they come from, against LAPACK and against float64."""

import pytest
import torch
from megaopt_soap import basis as basis_module
from megaopt_soap.basis import eigenbasis, orthonormal_rows
from megaopt_soap.symmetric import accumulate_gram, completed

pytestmark = pytest.mark.any_python


def deviation(rows: torch.Tensor) -> float:
    """Return how far rows are from orthonormal, in the Frobenius norm."""
    rows = rows.double()
    return (rows @ rows.mT - torch.eye(len(rows))).norm().item()


def power_iteration(
    size: int, power: float, drift: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return what a refresh decomposes: the image of an old basis under a factor whose spectrum falls with a power."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.arange(1, size + 1).double() ** -power
    samples = [scales[:, None] * torch.randn(size, 2 * size, generator=generator).double() for _ in range(2)]
    old, new = (sample @ sample.mT / size for sample in samples)
    basis = torch.linalg.eigh(old).eigenvectors.mT.flip(0)
    return (basis @ ((1 - drift) * old + drift * new)).to(dtype)


@pytest.mark.parametrize("drift", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("size", [20, 500])
def test_rows_are_as_orthonormal_as_householders(size, power, drift):
    """Whatever the spectrum, and however far the basis is from it."""
    rows = power_iteration(size, power, drift)
    householder = torch.linalg.qr(rows.mT).Q.mT
    assert deviation(orthonormal_rows(rows)) <= 1.5 * deviation(householder) + 2e-6


@pytest.mark.parametrize("size", [20, 500])
def test_rows_are_those_of_the_qr_decomposition(size):
    """But for signs."""
    rows = power_iteration(size, 0.5, 0.2, torch.float64)
    exact = torch.linalg.qr(rows.mT).Q.mT
    ours = orthonormal_rows(rows)
    torch.testing.assert_close(ours * (ours * exact).sum(1, keepdim=True).sign(), exact, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [20, 500])
def test_dependent_rows_are_completed(size):
    """Rows of zeros, and rows that repeat, leave the basis a basis."""
    for rank in (0, 1, size // 2):
        rows = torch.zeros(size, size)
        rows[:rank] = torch.randn(rank, size, generator=torch.Generator().manual_seed(0))
        rows[-1] = rows[0]
        assert deviation(orthonormal_rows(rows)) < 1e-4


def test_blocks_serve_where_rows_are_independent(monkeypatch):
    """Householder vectors are a way out, not the rule."""
    monkeypatch.setattr(torch, "geqrf", lambda _: pytest.fail("not by blocks"))
    for power in (0.0, 0.5, 1.0):
        orthonormal_rows(power_iteration(500, power, 0.05))


def test_nan_stays_nan():
    """Nothing hangs and nothing raises."""
    rows = torch.ones(500, 500)
    rows[3, 4] = torch.nan
    assert orthonormal_rows(rows).isnan().any()
    assert eigenbasis(rows).isnan().all()


def test_eigenvectors_are_sorted():
    """Largest eigenvalue first, as rows."""
    samples = torch.randn(30, 60, generator=torch.Generator().manual_seed(0)).double()
    factor = samples @ samples.mT
    rotated = eigenbasis(factor) @ factor @ eigenbasis(factor).mT
    torch.testing.assert_close(rotated.diagonal(), torch.linalg.eigvalsh(factor).flip(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(rotated, rotated.diagonal().diag(), rtol=0, atol=1e-11)


def test_eigenvectors_in_float64_where_float32_does_not_converge(monkeypatch):
    """LAPACK gives up on a few matrices in float32."""
    real = torch.linalg.eigh

    def eigh(matrix):
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return real(matrix)

    monkeypatch.setattr(basis_module.torch.linalg, "eigh", eigh)
    rows = eigenbasis(torch.diag(torch.tensor([1.0, 3.0, 2.0])))
    assert rows.dtype is torch.float32
    assert rows.abs().tolist() == [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]


@pytest.mark.parametrize("columns", [40, 700])
@pytest.mark.parametrize("size", [1, 30, 600])
@pytest.mark.parametrize("transposed", [False, True])
def test_factors_are_accumulated(size, columns, transposed):
    """One triangle by blocks, and the other as its mirror image."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(columns, size, generator=generator).mT if transposed else None
    rows = torch.randn(size, columns, generator=generator) if rows is None else rows
    total, expected = torch.zeros(size, size), torch.zeros(size, size).double()
    for weight in (1.0, 0.25):
        accumulate_gram(total, rows, weight)
        expected = (1 - weight) * expected + weight * rows.double() @ rows.mT.double()
    assert completed(total) is total
    torch.testing.assert_close(total.double(), expected, rtol=0, atol=1e-3 * columns**0.5 / 10)
    assert torch.equal(total, total.mT)


@pytest.mark.parametrize("size", [64, 384, 512])
@pytest.mark.parametrize("rank", [1, 3, 20])
def test_factors_of_low_rank_with_rows_of_zeros(size: int, rank: int) -> None:
    """Features that never fire make them, and LAPACK's float32 fails for a part of them."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(rank, size, generator=generator) * (torch.rand(size, generator=generator) < 0.65)
        rows *= 10.0 ** (-seed % 7) * torch.logspace(0, -seed / 2, rank)[:, None]
        factor = rows.mT @ rows
        basis = eigenbasis(factor)
        assert torch.allclose(basis @ basis.mT, torch.eye(size), atol=1e-5)
        rotated = basis @ factor @ basis.mT
        assert (rotated - rotated.diagonal().diag()).abs().max() <= 1e-4 * factor.abs().max()


def test_what_float32_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and errors of float32 are computed in float64; where that fails, the basis is the identity."""
    eigh, refused = torch.linalg.eigh, {torch.float32}

    def failing(matrix: torch.Tensor) -> object:
        found = eigh(matrix)
        if matrix.dtype not in refused:
            return found
        if matrix[0, 0] > 4.5:
            raise RuntimeError("linalg.eigh: The algorithm failed to converge")
        return torch.return_types.linalg_eigh((found.eigenvalues, found.eigenvectors * torch.nan))

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    for first in (4.0, 5.0):
        factor = torch.tensor([[first, 1.0], [1.0, 3.0]])
        rotated = eigenbasis(factor) @ factor @ eigenbasis(factor).mT
        assert torch.allclose(rotated, rotated.diagonal().diag(), atol=1e-6)
        assert eigenbasis(torch.zeros(2, 2)).abs().equal(torch.eye(2).flip(0))
    refused.add(torch.float64)
    assert eigenbasis(torch.tensor([[4.0, 1.0], [1.0, 3.0]])).equal(torch.eye(2))
