"""The kernels of the optional extra are called as their interface says."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megaopt_muon import hopper, symmetric
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.newton_schulz import NewtonSchulz


def stand_in(calls):
    """Return a function with the kernel's interface that notes its calls."""

    def gemm_symmetric(A, B, C=None, out=None, out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0):  # noqa: N803
        assert out_dtype is None
        assert not dynamic_scheduler
        assert isinstance(alpha, float)
        assert isinstance(beta, float)
        assert C is None or C.data_ptr() != out.data_ptr()
        calls.append(tuple(out.shape))
        product = alpha * A @ B
        return out.copy_(product if C is None else product + beta * C)

    return gemm_symmetric


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (3, 16, 40)])
def test_the_iteration_is_the_same_with_the_kernel(monkeypatch, shape, method):
    """Every symmetric product goes to the kernel, and the result does not change."""
    update = torch.randn(shape, dtype=torch.float64)
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "highest", method)
    expected = ns(update)
    calls = []
    monkeypatch.setattr(symmetric, "symmetric_kernel", lambda _: stand_in(calls))
    torch.testing.assert_close(ns(update), expected, rtol=0, atol=1e-10)
    assert len(calls) == (10 if method == "standard" else 14)


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_the_kernel_is_taken_where_it_runs(monkeypatch, capability, found):
    """It needs the package, a GPU that it is made for, two-byte numbers and a size that fills its tiles."""
    module = ModuleType("quack.gemm_interface")
    module.gemm_symmetric = stand_in([])
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(hopper.importlib.util, "find_spec", lambda name: name == "quack" or None)
    hopper._installed.cache_clear()

    def out(size, dtype=torch.bfloat16, device="cuda"):
        return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(size, size))

    assert (hopper.symmetric_kernel(out(512)) is not None) is found
    assert hopper.symmetric_kernel(out(128)) is None
    assert hopper.symmetric_kernel(out(512, torch.float32)) is None
    assert hopper.symmetric_kernel(out(512, device="cpu")) is None
    hopper._installed.cache_clear()
