"""Whatever dtype and device a program makes torch's own, a step is what it is without that."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.choice import calibration, onednn_share, rates
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.muon import TensorParallelMuon
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.pieces.execution import scales_of
from torch import nn

pytestmark = pytest.mark.any_python

DTYPES = [torch.float64, torch.float16, torch.bfloat16]
SHAPES = {"square": (192, 192), "long": (160, 400), "small": (16, 24)}


@pytest.fixture(params=DTYPES, ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Make another dtype torch's own, with nothing measured yet."""
    onednn_share._measured.cache_clear()
    calibration._probed.cache_clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)
    onednn_share._measured.cache_clear()
    calibration._probed.cache_clear()


def gaussian(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same numbers each time."""
    return torch.randn(shape, dtype=dtype, device="cpu", generator=torch.Generator("cpu").manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_step_of_float32(
    formulas: Any, no_file: Any, default_dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Also where what multiplies faster is measured first."""
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float32))
    param.grad = gaussian(shape)
    settings = {"lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "fp32_matmul_prec": "highest"}
    TensorParallelMuon([param], **settings, coefficient_type="simple", scale_mode="spectral").step()
    exact = formulas.newton_schulz64(gaussian(shape), resolve_coefficients("simple", 5))
    assert formulas.error(-param.detach() / max(shape) ** 0.5, exact) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scales_of_pieces(default_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """In the update's dtype: torch's own rounds them otherwise."""
    param = nn.Parameter(gaussian((22, 3), dtype))
    optimizer = TensorParallelAdaptiveMuon(
        [param], split_qkv=True, is_qkv_fn=lambda _: True, qkv_split_shapes=(6, 3, 2)
    )
    plan = optimizer.planner.plan(param)
    scales = scales_of(plan, param.detach())
    assert isinstance(scales, torch.Tensor)
    assert scales.dtype == dtype
    expected = {float(torch.tensor(scale, dtype=dtype)) for scale in plan.scales}
    assert len(expected) > 1
    assert set(scales.flatten().tolist()) == expected


def test_measured_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tensors are made elsewhere by default."""
    devices = set()
    outer = rates.outer

    def spied(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        devices.add(x.device.type)
        return outer(x, *args, **kwargs)

    monkeypatch.setattr(rates, "outer", spied)
    with torch.device("meta"):
        rates.probe()
    assert devices == {"cpu"}


def test_a_batch_on_the_processor() -> None:
    """Where tensors are made elsewhere by default."""
    ns, batch = NewtonSchulz(resolve_coefficients("simple", 5)), gaussian((2, 8, 12))
    expected = ns(batch)
    with torch.device("meta"):
        found = ns(batch)
    assert torch.equal(found, expected)
