"""Symmetric products equal full ones."""

import pytest
import torch
from megaopt_muon.products import panels
from megaopt_muon.products import symmetric as products
from megaopt_muon.products.panels import SymmetricMatrix, block_height
from megaopt_muon.products.symmetric import gram_matrix, is_tall, symmetric_product

pytestmark = pytest.mark.any_python

SIZES = [1, 5, 200, 240, 301, 520]


def empty(size: int, batch: tuple[int, ...] = (), *, dtype: torch.dtype = torch.float64) -> SymmetricMatrix:
    """Return a matrix in which everything that is not written shows."""
    return SymmetricMatrix(torch.full((*batch, size, size), torch.nan, dtype=dtype))


def assert_symmetric(matrix: SymmetricMatrix) -> None:
    """Assert that what lies below the diagonal blocks is a copy."""
    height = matrix.panels[0].rows.shape[-2]
    values = matrix.values
    if height < values.shape[-1]:
        assert torch.equal(values[..., height:, :height], values[..., :height, height:].mT)


KINDS = {"256 bits": (False, False), "512 bits": (True, False), "512 bits of bfloat16": (True, True)}
"""Processors: are vectors long, and do they multiply bfloat16?"""


@pytest.fixture(params=KINDS)
def vectors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cut as for any kind of processor without matrix units."""
    long, bfloat16 = KINDS[request.param]
    for module in (panels, products):
        monkeypatch.setattr(module, "has_long_vectors", lambda: long)
    monkeypatch.setattr(panels, "multiplies_bfloat16", lambda: bfloat16)
    monkeypatch.setattr(panels, "has_matrix_units", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return request.param


@pytest.mark.parametrize(
    ("size", "heights"),
    [(64, (64, 64, 64)), (128, (128, 128, 64)), (200, (96, 200, 64)), (520, (96, 128, 64))],
)
def test_block_rows_fit_the_vectors(vectors, size, heights):
    """With shorter ones, and with those that multiply bfloat16, blocks pay from smaller matrices on."""
    height = dict(zip(KINDS, heights, strict=True))[vectors]
    assert block_height(size, torch.float32, torch.device("cpu")) == height
    # Long ones read squares that are cut by columns.
    assert is_tall(torch.empty(size, size)) is (vectors != "256 bits" and height < size)


@pytest.mark.parametrize("vectors", ["512 bits of bfloat16"], indirect=True)
def test_threads_share_higher_block_rows(vectors, monkeypatch):
    """Where several threads multiply, a low block row is too little for each."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [block_height(size, torch.float32, torch.device("cpu")) for size in (128, 520)] == [128, 128]


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("size", [*SIZES, 800])
def test_gram_matrices_equal_full_products(size, batch, tall):
    """Every size and batch, from rows and from columns, gives what one full product gives."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(*batch, size, 40, generator=generator, dtype=torch.float64)
    out = gram_matrix(x.mT.contiguous() if tall else x, empty(size, batch), tall=tall)
    torch.testing.assert_close(out.values, x @ x.mT, rtol=0, atol=1e-12)
    assert_symmetric(out)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plus", [(-2.0, 0.0), (0.0, 1.5), (0.5, -3.0), (3.0, 0.5), (0.0, 0.0)])
def test_symmetric_products_equal_full_ones(size, batch, plus):
    """Numbers and tensors of numbers, equal and different operands: all give what full products give."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(*batch, size, size, generator=generator, dtype=torch.float64) / size
    left = SymmetricMatrix(x @ x.mT)
    right = SymmetricMatrix(left.values @ left.values - left.values)
    on_left, on_right = plus
    product = 3.0 * left.values @ right.values
    expected = product + on_left * left.values + on_right * right.values
    options = {"factor": 3.0, "plus_left": on_left, "plus_right": on_right}
    out = symmetric_product(left, right, empty(size, batch), **options)
    torch.testing.assert_close(out.values, expected, rtol=0, atol=1e-12)
    assert_symmetric(out)
    tensors = {"plus_left": torch.full((), on_left), "plus_right": torch.full((), on_right)}
    out = symmetric_product(left, right, empty(size, batch), factor=3.0, **tensors)
    torch.testing.assert_close(out.values, expected, rtol=0, atol=1e-12)
    squared = symmetric_product(left, left, empty(size, batch), plus_left=on_left, plus_right=on_right)
    expected = left.values @ left.values + (on_left + on_right) * left.values
    torch.testing.assert_close(squared.values, expected, rtol=0, atol=1e-12)


def test_an_accelerator_takes_one_call():
    """Block rows are for CPUs."""
    assert block_height(4096, torch.bfloat16, torch.device("meta")) == 4096
