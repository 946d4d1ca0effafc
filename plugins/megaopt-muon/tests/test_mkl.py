"""Triangles of products by MKL, where the extra is installed; and what happens where it is of no use."""

import ctypes
import math
import os
import platform
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.products import mkl
from megaopt_muon.products.panels import SymmetricMatrix, has_long_vectors
from megaopt_muon.products.symmetric import gram_matrix, is_tall, symmetric_product

pytestmark = pytest.mark.any_python

DTYPES = [torch.float32, torch.float64]

CPU = torch.device("cpu")

with_mkl = pytest.mark.skipif(not mkl._routines(), reason="megaopt-muon[mkl] is not installed, or of no use")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="not a system the extra is for"
)
@pytest.mark.skipif(
    os.environ.get("MEGAOPT_COMBO") != "py312-muon", reason="not the environment that installs it"
)
def test_the_extra_is_tested():
    """In the environment that installs it, none of the tests below is skipped."""
    assert set(mkl._routines()) == set(DTYPES)


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use MKL from 256 rows on, and count its products."""
    calls = []
    multiply = mkl.TriangleRoutine.__call__

    def counted(self, left, right, out, alpha=1.0, beta=0.0):
        calls.append(out.shape[0])
        multiply(self, left, right, out, alpha, beta)

    monkeypatch.setattr(
        "megaopt_muon.choice.methods.is_multiplied", lambda *_: False
    )  # oneDNN may be faster still
    monkeypatch.setattr(mkl, "_SMALLEST", 256)
    monkeypatch.setattr(mkl.TriangleRoutine, "__call__", counted)
    return calls


@with_mkl
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_one_triangle_equals_the_full_product(dtype, transposed):
    """Rows or columns may be contiguous, with gaps between them; below the diagonal nothing is written."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 1030, 70, generator=generator, dtype=dtype)[..., :50]
    tall = torch.randn(2, 50, 1040, generator=generator, dtype=dtype)[..., :1030]
    left = tall[0].mT if transposed[0] else wide[0]
    right = tall[1] if transposed[1] else wide[1].mT
    out = torch.randn(1030, 1048, generator=generator, dtype=dtype)[:, :1030]
    before = out.clone()
    mkl.triangle_routine(out, left, right)(left, right, out, alpha=-2.0, beta=0.5)
    expected = (0.5 * before.double() - 2.0 * left.double() @ right.double()).to(dtype)
    torch.testing.assert_close(
        out.triu(), expected.triu(), rtol=0, atol=1e-4 if dtype is torch.float32 else 1e-12
    )
    assert torch.equal(out.tril(-1), before.tril(-1))


@with_mkl
def test_what_was_there_does_not_matter_without_beta():
    """Memory that nothing was written to may hold NaN."""
    out = torch.full((1024, 1024), torch.nan)
    x = torch.ones(1024, 3)
    mkl.triangle_routine(out, x, x.mT)(x, x.mT, out)
    assert torch.equal(out.triu(), torch.full((1024, 1024), 3.0).triu())


@with_mkl
def test_threads_are_those_of_torch(monkeypatch):
    """MKL takes as many as torch; its own number, which other users of it may have set, is the same after as before."""
    out, x, seen = torch.empty(1024, 1024), torch.ones(1024, 3), []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    routine = mkl.triangle_routine(out, x, x.mT)
    use = routine._use_threads
    watched = mkl.TriangleRoutine(routine._multiply, lambda number: seen.append(number) or use(number))
    before = use(3)
    try:
        watched(x, x.mT, out)
    finally:
        assert use(before) == 3
    assert seen == [2, 3]


@with_mkl
@pytest.mark.parametrize("columns", [0, 1, 2])
@pytest.mark.parametrize("tall", [False, True])
def test_matrices_of_few_columns(tall, columns):
    """One column, whose two strides are both 1, is read by rows and as a transpose."""
    x = torch.randn(1024, columns, generator=torch.Generator().manual_seed(0))
    x = x.mT.contiguous() if tall else x
    out = gram_matrix(x, SymmetricMatrix(torch.full((1024, 1024), torch.nan)), tall=tall).values
    torch.testing.assert_close(out, x.mT @ x if tall else x @ x.mT)


@with_mkl
def test_strides_that_mkl_cannot_read_go_another_way():
    """Gaps between neighbours, overlapping rows and a result by columns are left to torch."""
    out, wide = torch.empty(1024, 1024), torch.ones(1024, 6)
    assert mkl.triangle_routine(out, wide, wide.mT) is not None
    gaps, same = wide[:, ::2], torch.ones(1, 6).expand(1024, 6)
    for operand in (gaps, same):
        assert mkl.triangle_routine(out, operand, operand.mT) is None
        expected = operand @ operand.mT
        assert torch.equal(gram_matrix(operand, SymmetricMatrix(out), tall=False).values, expected)
    assert mkl.triangle_routine(out.mT, wide, wide.mT) is None


@with_mkl
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [256, 301, 520])
def test_symmetric_products_equal_full_ones(every_size, size, dtype):
    """Gram matrices and polynomials come out whole and symmetric, with every combination of addends."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 40, generator=generator, dtype=dtype)
    close = {"rtol": 0, "atol": 1e-4 if dtype is torch.float32 else 1e-11}

    def empty() -> SymmetricMatrix:
        return SymmetricMatrix(torch.full((size, size), torch.nan, dtype=dtype))

    for tall in (False, True):
        out = gram_matrix(x.mT.contiguous() if tall else x, empty(), tall=tall).values
        torch.testing.assert_close(out, (x.double() @ x.double().mT).to(dtype), **close)
        assert torch.equal(out, out.mT)
    left = SymmetricMatrix(out / size)
    right = SymmetricMatrix(left.values @ left.values)
    for other in (left, right):
        for plus_left, plus_right in ((0.0, 0.0), (-2.0, 0.0), (0.0, 1.5), (0.5, -3.0)):
            got = symmetric_product(
                left, other, empty(), factor=3.0, plus_left=plus_left, plus_right=plus_right
            ).values
            exact = 3.0 * left.values.double() @ other.values.double()
            exact += plus_left * left.values + plus_right * other.values
            torch.testing.assert_close(got, exact.to(dtype), **close)
            assert torch.equal(got, got.mT)
    assert every_size == [size] * 10


@with_mkl
@pytest.mark.parametrize("kind", ["flat", "linear", "geometric:4", "power:1", "rank:8", "spike:10"])
@pytest.mark.parametrize("shape", [(320, 320), (320, 700), (700, 320)])
def test_the_iteration_is_as_accurate(every_size, formulas, shape, kind):
    """In float32 the error, over several sets of singular vectors, stays within 1.2 times the plain iteration's."""
    coefficients, errors = resolve_coefficients("quintic", 5), []
    for seed in range(4):
        update = formulas.with_singular_values(formulas.spectrum(kind, min(shape)), *shape, seed)
        exact = formulas.newton_schulz64(update, coefficients)
        plain = formulas.newton_schulz_plain(update, coefficients, torch.float32)
        got = NewtonSchulz(coefficients, "highest")(update)
        errors.append((formulas.error(got, exact), formulas.error(plain, exact)))
    got, plain = (math.hypot(*column) for column in zip(*errors, strict=True))
    assert got <= 1.2 * plain
    assert every_size


@with_mkl
def test_square_matrices_are_read_by_rows():
    """Which of the two Gram matrices of a square is cheaper depends on who computes it, and with how long vectors."""
    assert not is_tall(torch.empty(1, 1024, 1024))
    assert is_tall(torch.empty(1, 1000, 1000)) == has_long_vectors()


OF_TORCH = """
import torch
from megaopt_muon.products import mkl
assert not {with_mkl} or mkl._routines()
x = torch.randn(96, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
s = x @ x.mT
results = [torch.linalg.eigh(s)[1], torch.linalg.svd(x)[0], torch.linalg.qr(x)[1], torch.linalg.lu_factor(x)[0]]
results += [torch.linalg.cholesky_ex(s)[0], torch.linalg.eigvals(x), torch.fft.rfft2(x), x.erf(), x @ x]
print([result.to(torch.complex128).abs().sum(dtype=torch.complex128).real.item().hex() for result in results])
"""


@with_mkl
def test_the_mkl_in_torch_stays_the_one_that_torch_uses():
    """Results of torch's first calls into its own MKL are the same, bit for bit, with another one loaded before."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", OF_TORCH.format(with_mkl=flag)],
            capture_output=True, text=True, timeout=600, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        ).stdout
        for flag in (False, True)
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert outputs[0].count("0x") == 9


@with_mkl
def test_nan_and_zero_are_as_everywhere(every_size):
    """A NaN reaches all of its matrix, zero gives zero."""
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "highest")
    update = torch.zeros(300, 300)
    assert ns(update).count_nonzero() == 0
    update[3, 4] = torch.nan
    assert ns(update).isnan().all()
    assert every_size


@pytest.mark.parametrize(
    ("size", "dtype", "device"),
    [(1023, torch.float32, "cpu"), (1024, torch.bfloat16, "cpu"), (1024, torch.float32, "meta")],
)
def test_other_products_are_not_its_business(size, dtype, device):
    """Products that are small, in bfloat16, of another device or in batches go on as before."""
    assert not mkl.has_triangles(size, dtype, torch.device(device))
    x = torch.empty(2, 1024, 3)
    assert mkl.triangle_routine(torch.empty(2, 1024, 1024), x, x.mT) is None


class Library(SimpleNamespace):
    """Stands in for MKL's library."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


THREADS = ctypes.CFUNCTYPE(None)(lambda: None)


def library(**changes: Any) -> Library:
    """Return a library with everything that is asked of one, whose products are never written."""
    parts = {
        "GOMP_parallel": THREADS,
        "MKL_Set_Interface_Layer": lambda layer: layer,
        "MKL_Set_Threading_Layer": lambda layer: layer,
        "MKL_Set_Num_Threads_Local": lambda _: 0,
        "cblas_sgemmt": lambda *_: None,
        "cblas_dgemmt": lambda *_: None,
    } | changes
    return Library(**{name: part for name, part in parts.items() if part != "missing"})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "something else than torch"),
        ({"MKL_Set_Threading_Layer": lambda _: 1}, r"layers \(0, 1\)"),
        ({"MKL_Set_Interface_Layer": lambda _: 1}, r"layers \(1, 3\)"),
        ({"cblas_dgemmt": "missing"}, "cblas_dgemmt"),
    ],
)
def test_a_library_that_is_of_no_use_is_left_alone(monkeypatch, changes, reason):
    """Wrong numbers, foreign layers and a missing routine are told once, and Muon goes on."""
    monkeypatch.setattr(mkl, "_installed", lambda: "libmkl_rt.so")
    monkeypatch.setattr(mkl.ctypes, "CDLL", lambda *_, **__: library(**changes))
    with pytest.warns(UserWarning, match=f"goes on without the installed MKL: .*{reason}"):
        assert mkl._routines.__wrapped__() == {}


def test_without_gnu_threads_it_is_not_loaded(monkeypatch):
    """MKL ends the process when it finds no OpenMP of that kind, and runs beside torch's if it finds another."""
    monkeypatch.setattr(mkl, "_installed", lambda: "libmkl_rt.so")
    other = ctypes.CFUNCTYPE(None)(lambda: None)
    for process in (library(GOMP_parallel="missing"), library(GOMP_parallel=other)):
        opened = {"libgomp.so.1": library(), None: process}
        monkeypatch.setattr(mkl.ctypes, "CDLL", lambda path, opened=opened, **_: opened[path])
        assert mkl._routines.__wrapped__() == {}


@with_mkl
def test_another_default_device_does_not_matter():
    """What is tried out on loading lies where MKL can read it."""
    with torch.device("meta"):
        assert set(mkl._routines.__wrapped__()) == set(DTYPES)


def test_a_distribution_that_is_not_there_or_not_for_this_system(monkeypatch):
    """Neither a missing distribution, nor one without a list of files, nor another system is an error."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mkl.sys, "platform", "linux")
    for files in (missing, lambda _: None, lambda _: []):
        monkeypatch.setattr(mkl.metadata, "files", files)
        assert mkl._installed() is None
    monkeypatch.setattr(mkl.sys, "platform", "darwin")
    assert mkl._installed() is None
    assert mkl._routines.__wrapped__() == {}
