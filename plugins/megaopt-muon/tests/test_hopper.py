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


def kernel_for(matrix: torch.Tensor) -> Callable[..., object] | None:
    """Return the kernel for the product of a matrix and its transpose."""
    return hopper.symmetric_kernel(matrix, matrix, matrix.mT)


@pytest.mark.parametrize(("capability", "found"), [((9, 0), True), ((10, 0), True), ((8, 0), False)])
def test_the_kernel_is_taken_where_it_runs(gpu, capability, found):
    """It needs the package, a GPU that it is made for, two-byte numbers and a product that is worth a call."""
    gpu.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (kernel_for(square(4096)) is not None) is found
    assert (kernel_for(square(4096, torch.float16)) is not None) is found
    assert kernel_for(square(1024)) is None
    assert kernel_for(square(4096, torch.float32)) is None
    assert kernel_for(square(4096, device="cpu")) is None
    assert hopper.kernel_share(torch.device("cuda", 0)) == (0.7 if found else 1.0)


def test_small_matrices_are_taken_in_large_batches(gpu):
    """What counts are the operations of a call; of fewer rows than a tile's none is taken."""
    with FakeTensorMode():
        batch, low = (torch.empty(64, size, 1024, dtype=torch.float16, device="cuda") for size in (1024, 128))
        out, low_out = (
            torch.empty(64, size, size, dtype=torch.float16, device="cuda") for size in (1024, 128)
        )
    assert hopper.symmetric_kernel(out, batch, batch.mT) is not None
    assert hopper.symmetric_kernel(out[:1], batch[:1], batch[:1].mT) is None
    assert hopper.symmetric_kernel(low_out, low, low.mT) is None


def test_the_kernel_is_taken_for_aligned_operands_only(gpu):
    """Rows of 16 bytes and memory that begins at a multiple of them, of every operand; either order of dimensions."""
    assert kernel_for(square(4100)) is None
    out = square(4096)
    with FakeTensorMode():
        aligned, odd = (
            torch.empty(4096, width, dtype=torch.bfloat16, device="cuda") for width in (2400, 2404)
        )
        shifted = torch.empty(4096 * 2400 + 1, dtype=torch.bfloat16, device="cuda")[1:].view(4096, 2400)
        batch = torch.empty(3, 4096, 4096, dtype=torch.bfloat16, device="cuda")
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
    monkeypatch.setattr(hopper, "_FEWEST", 0.0)
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
    assert kernel_for(square(4096)) is None


def test_a_package_that_cannot_be_imported_is_not_the_end(gpu):
    """Kernels that fail to import, or miss the function, are warned of once; the product goes on without."""
    gpu.setitem(sys.modules, "quack.gemm_interface", None)
    with pytest.warns(UserWarning, match="goes on without the kernels of quack-kernels.*gemm_interface"):
        assert kernel_for(square(4096)) is None
    assert kernel_for(square(4096)) is None
    hopper._kernel_of.cache_clear()
    assert kernel_for(square(4096)) is None
    hopper._kernel_of.cache_clear()
    hopper._installed.cache_clear()
    gpu.setitem(sys.modules, "quack.gemm_interface", ModuleType("quack.gemm_interface"))
    with pytest.warns(UserWarning, match="gemm_symmetric"):
        assert kernel_for(square(4096)) is None
