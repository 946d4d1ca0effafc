"""Matrices of 16 bits whose diagonals are known in 32."""

import pytest
import torch
from megaopt_muon.newton_schulz.exact import (
    Exact,
    apply,
    first_polynomial,
    gram_of,
    polynomial,
    single_polynomial,
    times,
)
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.newton_schulz.scaled import Scaled
from megaopt_muon.pieces.batches import is_single
from megaopt_muon.products import narrow
from megaopt_muon.products.narrow import commuting, outer, outer_memory, product
from megaopt_muon.products.workspace import Workspace

pytestmark = pytest.mark.any_python

SIZE = 64
TRIPLE = (3.4445, -4.775, 2.0315)


def near_identity(seed: int, size: int = SIZE) -> torch.Tensor:
    """Return a symmetric matrix of 16 bits whose eigenvalues are all near one."""
    rest = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return ((rest + rest.mT) * 1e-3 + 0.9 * torch.eye(size)).bfloat16()


def as_stored(values: torch.Tensor) -> Exact:
    """Return a matrix whose diagonal is known as it is stored."""
    diagonal = values.diagonal().float()
    return Exact(values, diagonal, diagonal)


def like(matrix: Exact) -> torch.Tensor:
    """Return memory for a result."""
    return torch.empty_like(matrix.values)


def value(matrix: Exact) -> torch.Tensor:
    """Return what a matrix stands for: the diagonal as it should be."""
    whole = matrix.values.double()
    whole.diagonal().copy_(matrix.diagonal)
    return whole * matrix.scale


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((got - exact).norm() / exact.norm())


def test_a_chain_of_products_keeps_its_diagonal():
    """Shifting and squaring again and again errs by the rounding of results alone, not by that of what was shifted."""
    a = as_stored(near_identity(0))
    exact = value(a)
    for _ in range(3):
        w = polynomial(a, TRIPLE, like(a))
        power = TRIPLE[0] * torch.eye(SIZE) + TRIPLE[1] * exact + TRIPLE[2] * exact @ exact
        assert relative(value(w), power) < 2**-9
        a, exact = times(w, w, like(w)), power @ power
        assert relative(value(a), exact) < 2**-8
        a, exact = as_stored(near_identity(1)), value(as_stored(near_identity(1)))


def test_a_single_polynomial_is_the_polynomial():
    """In fewer calls, with a factor that makes the trace that of the polynomial."""
    gram = near_identity(0)
    exact = gram.double()
    exact = TRIPLE[0] * torch.eye(SIZE) + TRIPLE[1] * exact + TRIPLE[2] * exact @ exact
    out = torch.empty_like(gram)
    factor = single_polynomial(gram, TRIPLE, out)
    assert relative(factor * out.double(), exact) < 2**-9
    assert float(factor * out.double().trace()) == pytest.approx(float(exact.trace()), rel=2**-11)


def test_what_rounding_does_to_a_diagonal_is_taken_off_a_product():
    """Of two shifted matrices the product is that of the matrices before they were rounded."""
    a, b = as_stored(near_identity(0)), as_stored(near_identity(1))
    shifted = [polynomial(m, (0.1234567, 1.0, 0.0), like(m)) for m in (a, b)]
    exact = value(shifted[0]) @ value(shifted[1])
    found = times(*shifted, like(a))
    as_it_is = shifted[0].values.double() @ shifted[1].values.double()
    assert relative(value(found), exact) < 2**-9
    assert relative(as_it_is, exact) > 0


@pytest.mark.parametrize("triple", [TRIPLE, (2.0, -1.5, 0.0), (1.5, 0.0, 0.25)])
def test_the_first_polynomial_tells_the_norm(triple):
    """It is the polynomial, and the Gram matrix's Frobenius norm, where there is a square."""
    workspace = Workspace()
    x = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    gram = gram_of(Scaled(x, float(1.0 / x.double().norm())), 1.0, workspace)
    exact = value(gram)
    norm = float(exact.norm())
    w, found = first_polynomial(gram, triple, like(gram))
    expected = triple[0] * torch.eye(48) + triple[1] * exact + triple[2] * exact @ exact
    assert relative(value(w), expected) < 2**-9
    assert found == (pytest.approx(norm, rel=0.02) if triple[2] else float("inf"))


@pytest.mark.parametrize("tall", [False, True])
def test_a_factor_goes_with_the_product(tall):
    """What is applied is applied once and scaled, and the common error of the diagonal is taken back."""
    q = polynomial(as_stored(near_identity(0)), (1.0, 1e-4, 0.0), torch.empty(SIZE, SIZE).bfloat16())
    x = torch.randn(SIZE, 100, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.mT.contiguous() if tall else x
    got = apply(q, Scaled(x, 0.5), torch.empty_like(x), 3.0, tall=tall)
    exact = 1.5 * (x.double() @ value(q) if tall else value(q) @ x.double())
    assert got.scale == 1.0
    assert relative(got.values.double(), exact) < 2**-8


def smaller(monkeypatch: pytest.MonkeyPatch, *, units: bool) -> None:
    """Have block rows made of small matrices, as on a processor with matrix units or without."""
    monkeypatch.setattr(narrow, "has_matrix_units", lambda: units)
    settings = {"_BLOCK": 16, "_TALL": 32, "_WIDE": 32, "_LARGE": 96}
    for name, value in {**settings, "_VECTORS": ((80, 12), (40, 16)), "_VECTORS_DEEP": (32, 8)}.items():
        monkeypatch.setattr(narrow, name, value)


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("size", [39, 48, 70, 100])
def test_a_square_by_block_rows_is_the_square(monkeypatch, size, with_base):
    """Where vectors multiply, squares are made by block rows too, with and without an addend: symmetric, and right."""
    smaller(monkeypatch, units=False)
    a = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    a = (a + a.mT).bfloat16()
    base, beta = (a, -0.5) if with_base else (None, 1.0)
    got = commuting(a, a, 0.25, torch.empty_like(a), base, beta)
    exact = 0.25 * a.double() @ a.double() - (0.5 * a.double() if with_base else 0.0)
    assert torch.equal(got, got.mT)
    assert relative(got.double(), exact) < 2**-8


@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-60])
@pytest.mark.parametrize("beta", [None, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(64, 64), (2, 1, 1), (2, 8, 8), (2, 64, 64)])
def test_a_product_of_factor_zero_reads_no_old_memory(shape, beta, factor):
    """What lies where the result goes is never read: torch leaves it there for batches of 16 bits."""
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.full(shape, float("nan")).bfloat16()
    base = None if beta is None else a
    got = product(a, a, factor, out, base, 1.0 if beta is None else beta)
    assert got is out
    assert torch.equal(got, a * (beta or 0.0))


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("size", "depth"), [(96, 100), (70, 150), (100, 1000), (33, 70)])
@pytest.mark.parametrize("units", [False, True])
def test_block_rows_are_the_product(monkeypatch, size, depth, tall, units):
    """Made right of the diagonal and copied below it, in as many block rows as it takes: symmetric, and the product."""
    smaller(monkeypatch, units=units)
    x = torch.randn(size, depth, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = x.mT.contiguous() if tall else x
    gram = outer_memory(x, Workspace(), tall=tall)
    outer(x, 0.25, gram, tall=tall)
    exact = 0.25 * (x.mT.double() @ x.double() if tall else x.double() @ x.mT.double())
    assert torch.equal(gram, gram.mT)
    assert relative(gram.double(), exact) < 2**-8


@pytest.mark.parametrize("columns", [256, 300, 512, 700, 768, 1024])
def test_rows_lie_an_odd_number_of_cache_lines_apart(columns):
    """So they do not share the same few sets of a cache, and none begins inside a line; small matrices have no gaps."""
    device, workspace = torch.device("cpu"), Workspace()
    taken = workspace.take("a", (columns, columns), torch.bfloat16, device, odd_lines=True)
    assert taken.shape == (columns, columns)
    assert taken.stride(0) % 64 == 32
    assert 0 <= taken.stride(0) - columns < 64
    assert workspace.take("b", (64, 64), torch.bfloat16, device, odd_lines=True).is_contiguous()


@pytest.mark.usefixtures("in_bfloat16")
def test_matrices_up_to_256_rows_and_columns_go_in_batches():
    """Products of a batch of them take half the time of single ones; longer ones are iterated one by one."""
    ns, device = NewtonSchulz((TRIPLE,) * 5, "medium"), torch.device("cpu")
    alone = [is_single(ns, (256, columns), torch.float32, device) for columns in (128, 256, 288, 1024)]
    assert alone == [False, False, True, True]
