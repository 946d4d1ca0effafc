"""The kernels of the optional extra are called as their interface says."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from megaopt_muon.coefficients import resolve_coefficients
from megaopt_muon.newton_schulz import iteration as newton_schulz
from megaopt_muon.newton_schulz.iteration import NewtonSchulz
from megaopt_muon.products import hopper, symmetric
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.any_python


def stand_in(calls: list[tuple[int, ...]]) -> Callable[..., torch.Tensor]:
    """Return a function with the kernel's interface that notes its calls and takes what the kernel takes."""

    def gemm_symmetric(A, B, C=None, out=None, out_dtype=None, dynamic_scheduler=False, alpha=1.0, beta=1.0):  # noqa: N803
        assert out_dtype is None
        assert not dynamic_scheduler
        assert isinstance(alpha, float)
        assert isinstance(beta, float)
        assert C is None or C.data_ptr() != out.data_ptr()
        for operand in (A, B, out) if C is None else (A, B, C, out):
            fastest, *strides = sorted(operand.stride()[-2:])
            strides = [*operand.stride()[:-2], *strides]
            assert fastest == 1
            assert all(stride * operand.itemsize % 16 == 0 for stride in strides)
            assert operand.data_ptr() % 16 == 0
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
    monkeypatch.setattr(symmetric, "symmetric_kernel", lambda *_: stand_in(calls))
    torch.testing.assert_close(ns(update), expected, rtol=0, atol=1e-10)
    assert len(calls) == (10 if method == "standard" else 14)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Pretend that the extra is installed beside a GPU that it is made for; yield how to change that."""
    module = ModuleType("quack.gemm_interface")
    module.gemm_symmetric = stand_in([])
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    monkeypatch.setattr(hopper.metadata, "version", lambda _: "0.5.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    hopper._kernel_of.cache_clear()
    hopper._installed.cache_clear()
    yield monkeypatch
    hopper._kernel_of.cache_clear()
    hopper._installed.cache_clear()


def square(size: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    """Return a matrix without memory, on a device that need not be there."""
    with FakeTensorMode():
        return torch.empty(size, size, dtype=dtype, device=device)


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_the_kernel_is_taken_where_it_runs(gpu, capability, found):
    """It needs the package, a GPU that it is made for, two-byte numbers and a size that fills its tiles."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (hopper.symmetric_kernel(square(512)) is not None) is found
    assert hopper.symmetric_kernel(square(128)) is None
    assert hopper.symmetric_kernel(square(512, torch.float32)) is None
    assert hopper.symmetric_kernel(square(512, device="cpu")) is None


def test_the_kernel_is_taken_for_aligned_operands_only(gpu):
    """Rows of 16 bytes and memory that begins at a multiple of them, of every operand; either order of dimensions."""
    assert hopper.symmetric_kernel(square(260)) is None
    out = square(264)
    with FakeTensorMode():
        aligned, odd = (torch.empty(264, width, dtype=torch.bfloat16, device="cuda") for width in (24, 20))
        shifted = torch.empty(264 * 24 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(264, 24)
        batch = torch.empty(3, 264, 264, dtype=torch.bfloat16, device="cuda")
    assert hopper.symmetric_kernel(out, aligned, aligned.mT) is not None
    assert hopper.symmetric_kernel(batch, batch, batch.mT) is not None
    assert hopper.symmetric_kernel(out, odd, odd.mT) is None
    assert hopper.symmetric_kernel(out, aligned, odd.mT) is None
    assert hopper.symmetric_kernel(out, shifted, shifted.mT) is None


@pytest.mark.parametrize(
    ("shape", "used"),
    [
        ((264, 304), 10),
        ((304, 264), 10),
        ((264, 300), 5),
        ((300, 264), 10),
        ((260, 304), 0),
        ((2, 257, 304), 0),
    ],
)
@pytest.mark.usefixtures("in_bfloat16")
def test_what_is_not_aligned_goes_without_the_kernel(monkeypatch, shape, used):
    """The iteration calls the kernel for aligned products alone, and gives the same for every shape."""
    monkeypatch.setattr(newton_schulz, "is_narrow", lambda *_: False)  # as on an accelerator
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ns = NewtonSchulz(resolve_coefficients("quintic", 5), "medium", "standard")
    expected, calls = ns(update).float(), []
    monkeypatch.setattr(hopper, "_kernel_of", lambda _: stand_in(calls))
    torch.testing.assert_close(ns(update).float(), expected, rtol=0, atol=2e-2)
    assert len(calls) == used


def test_no_package_no_kernel(gpu):
    """Another package that is called quack is not taken for the kernels'."""

    def missing(name):
        raise hopper.metadata.PackageNotFoundError(name)

    gpu.setattr(hopper.metadata, "version", missing)
    assert hopper.symmetric_kernel(square(512)) is None


def test_a_package_that_cannot_be_imported_is_not_the_end(gpu):
    """Kernels that fail to import, or miss the function, are warned of once; the product goes on without."""
    gpu.setitem(sys.modules, "quack.gemm_interface", None)
    with pytest.warns(UserWarning, match="goes on without the kernels of quack-kernels.*gemm_interface"):
        assert hopper.symmetric_kernel(square(512)) is None
    assert hopper.symmetric_kernel(square(512)) is None
    hopper._kernel_of.cache_clear()
    assert hopper.symmetric_kernel(square(512)) is None
    hopper._kernel_of.cache_clear()
    hopper._installed.cache_clear()
    gpu.setitem(sys.modules, "quack.gemm_interface", ModuleType("quack.gemm_interface"))
    with pytest.warns(UserWarning, match="gemm_symmetric"):
        assert hopper.symmetric_kernel(square(512)) is None
