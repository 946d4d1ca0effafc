"""What Newton-Schulz computes in."""

from collections.abc import Iterator

import pytest
import torch
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.products import precision

pytestmark = pytest.mark.any_python

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("capabilities", "multiplies", "has_units"),
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False}, False, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True, False),
        ({"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": True}, True, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True, True),
        ({"architecture": "aarch64"}, True, True),
    ],
)
def test_the_processor_is_asked(monkeypatch, capabilities, multiplies, has_units):
    """Instructions of x86 processors are known; others are taken to have them."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert precision.multiplies_bfloat16.__wrapped__() is multiplies
    assert precision.has_matrix_units.__wrapped__() is has_units


def test_torch_tells_by_these_names():
    """Should torch rename what it tells of x86 processors, all of them would pass for fast."""
    capabilities = torch.cpu.get_capabilities()
    assert capabilities["architecture"] != "x86_64" or capabilities.keys() >= {"avx512_bf16", "amx_bf16"}


def test_a_torch_that_cannot_be_asked_computes_in_bfloat16(monkeypatch):
    """What torch does not tell is taken to be there."""
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert precision.multiplies_bfloat16.__wrapped__() is True


@pytest.mark.parametrize("dtype", DTYPES)
def test_medium_is_bfloat16_where_it_is_fast(monkeypatch, dtype):
    """An accelerator computes in bfloat16, a processor if it can."""
    for can in (True, False):
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda can=can: can)
        assert precision.compute_dtype("medium", dtype, torch.device("cuda")) is torch.bfloat16
        expected = torch.bfloat16 if can else torch.float32
        assert precision.compute_dtype("medium", dtype, CPU) is expected
        ns = NewtonSchulz(resolve_coefficients("quintic", 5), "medium")
        assert ns.scaled(torch.ones(4, 6, dtype=dtype)).values.dtype is expected


@pytest.mark.parametrize("name", ["high", "highest"])
def test_the_others_are_at_least_float32(name):
    """Narrow updates are widened, wide ones stay."""
    assert [precision.compute_dtype(name, dtype, CPU) for dtype in DTYPES] == [torch.float32] * 3 + [
        torch.float64
    ]


@pytest.mark.parametrize(
    ("name", "inside"), [("medium", "highest"), ("high", "high"), ("highest", "highest")]
)
@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_float32_products_have_the_precision_inside_only(monkeypatch, name, inside, before):
    """TF32 is allowed under high alone; afterwards, also after an error, all is as it was."""
    seen = [before]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: seen[-1])
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)

    def fail():
        with precision.matmul_precision(name):
            assert seen[-1] == inside
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == ([before] if before == inside else [before, inside, before])


@pytest.fixture
def sums_in_float16() -> Iterator[None]:
    """Allow products of float16 to be added up in float16."""
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    yield
    torch.backends.cuda.matmul.allow_fp16_accumulation = False


@pytest.mark.usefixtures("sums_in_float16")
def test_products_are_added_up_in_float32():
    """What a training allows its own products holds again afterwards, also where an iteration raises."""
    with precision.matmul_precision("medium"):
        assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    assert torch.backends.cuda.matmul.allow_fp16_accumulation
    with pytest.raises(ZeroDivisionError), precision.matmul_precision("high"):
        raise ZeroDivisionError
    assert torch.backends.cuda.matmul.allow_fp16_accumulation
