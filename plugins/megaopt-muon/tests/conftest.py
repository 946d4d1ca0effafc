"""The formulas that the tests of megaopt-muon compare with, in float64."""

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megaopt_muon.choice import books
from megaopt_muon.choice.calibration import VARIABLE, stored_rates_of
from megaopt_muon.products import precision
from megaopt_muon.products.onednn import is_multiplied

sys.path.insert(0, str(Path(__file__).parent))


def newton_schulz64(update: torch.Tensor, coefficients: Sequence[tuple[float, float, float]]) -> torch.Tensor:
    """Newton-Schulz as the documentation writes it, in float64."""
    x = update.double()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-15)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def newton_schulz_plain(
    update: torch.Tensor, coefficients: Sequence[tuple[float, float, float]], dtype: torch.dtype
) -> torch.Tensor:
    """The same, the plain way, in a dtype that rounds."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = (x / x.double().norm().clamp_min(1e-15).float()).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def with_singular_values(values: torch.Tensor, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a float32 matrix with these singular values and random singular vectors."""
    left, right = _singular_vectors(min(rows, columns), max(rows, columns), seed)
    matrix = ((left * values) @ right.mT).float()
    return matrix if rows <= columns else matrix.mT.contiguous()


@lru_cache(maxsize=64)
def _singular_vectors(small: int, large: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(small, small, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(large, small, generator=generator, dtype=torch.float64))[0]
    return left, right


def spectrum(kind: str, size: int) -> torch.Tensor:
    """Return singular values by the name of a spectrum."""
    i = torch.arange(size, dtype=torch.float64)
    name, _, number = kind.partition(":")
    value = float(number or 0)
    return {
        "flat": lambda: torch.ones(size, dtype=torch.float64),
        "linear": lambda: 1 - i / size,
        "geometric": lambda: 10 ** (-value * i / max(1, size - 1)),
        "power": lambda: (i + 1) ** -value,
        "rank": lambda: torch.where(i < value, 1.0, 0.0).double(),
        "half": lambda: torch.where(i < size // 2, 10 ** (-2 * i / size), 0.0),
        "two": lambda: torch.where(i < size // 2, 1.0, 1e-6),
        "spike": lambda: torch.where(i < 1, value, 1.0),
        "huge": lambda: 1e25 * 10 ** (-3 * i / size),
        "tiny": lambda: 1e-5 * 10 ** (-3 * i / size),
    }[name]()


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((result.double() - exact).norm() / exact.norm()).item()


@lru_cache(maxsize=512)
def example(
    kind: str, rows: int, columns: int, seed: int, coefficients: Sequence[tuple[float, float, float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix of a spectrum, and its Newton-Schulz iteration in float64; made once for tests in a row."""
    update = with_singular_values(spectrum(kind, min(rows, columns)), rows, columns, seed)
    return update, newton_schulz64(update, coefficients)


@lru_cache(maxsize=1024)
def plain_error(
    kind: str,
    rows: int,
    columns: int,
    seed: int,
    coefficients: Sequence[tuple[float, float, float]],
    dtype: torch.dtype,
) -> float:
    """Return the error of the plain iteration of an example in a dtype that rounds."""
    update, exact = example(kind, rows, columns, seed, coefficients)
    return error(newton_schulz_plain(update, coefficients, dtype), exact)


@pytest.fixture(scope="session")
def formulas() -> SimpleNamespace:
    """The formulas, as attributes."""
    return SimpleNamespace(
        newton_schulz64=newton_schulz64,
        newton_schulz_plain=newton_schulz_plain,
        with_singular_values=with_singular_values,
        spectrum=spectrum,
        error=error,
        example=example,
        plain_error=plain_error,
    )


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Precision medium computes in bfloat16, as on an accelerator, also where the processor is slow at it."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: True)


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Precision medium computes in float32, as where the processor cannot multiply bfloat16."""
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: False)


@pytest.fixture
def by_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take oneDNN to multiply float32 faster than torch's own library, whatever processor this is."""
    if not is_multiplied(256, torch.float32, torch.device("cpu")):
        pytest.skip("this torch has no products of oneDNN's in float32")
    monkeypatch.setattr(books, "current_share", lambda _: 0.5)


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take torch's own library to multiply float32 as fast as oneDNN, whatever processor this is."""
    monkeypatch.setattr(books, "current_share", lambda _: 1.0)


@pytest.fixture
def no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Look for a calibration where there is none."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stored_rates_of.cache_clear()
    yield tmp_path / "megaopt" / "calibration.json"
    stored_rates_of.cache_clear()
