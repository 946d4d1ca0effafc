"""Triangles of products on x86 processors, by the MKL that the extra `megaopt-muon[mkl]` brings.

`cblas_?gemmt` multiplies like `cblas_?gemm` but computes one triangle of the result, in little more than half the time.
The MKL inside of torch lacks it. A second one beside it does no harm: torch has resolved all of its symbols before this
one is loaded, and shows it none of its own. It runs on the threads of torch's OpenMP, which must be GNU's.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any, Final

import torch
from attrs import frozen

__all__ = ["TriangleRoutine", "triangle_routine"]

_SMALLEST: Final = 1024
"""Rows of the smallest result for which it pays; in smaller ones copying the triangle takes what is gained."""

# Of the C interfaces of BLAS and MKL.
_ROW_MAJOR, _UPPER, _PLAIN, _TRANSPOSED = 101, 121, 111, 112
_GNU_THREADS = 3


@frozen
class TriangleRoutine:
    """One of MKL's `cblas_?gemmt`."""

    _multiply: Callable[..., None]
    _use_threads: Callable[[int], int]

    def __call__(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Compute `alpha * left @ right + beta * out` on and above the diagonal.

        Args:
            left: `[n, k]`, its rows or its columns contiguous, as those of the others.
            right: `[k, n]`.
            out: `[n, n]`, rows contiguous; what lies below the diagonal stays as it is.
            alpha: on the product.
            beta: on what is there before; nothing is read if 0.
        """
        operands = [value for operand in (left, right) for value in _order_and_place(operand)]
        size, depth = left.shape
        before = self._use_threads(torch.get_num_threads())
        try:
            self._multiply(
                *(_ROW_MAJOR, _UPPER, operands[0], operands[3], size, depth),
                *(alpha, *operands[1:3], *operands[4:6], beta, out.data_ptr(), out.stride(0)),
            )
        finally:
            self._use_threads(before)


def triangle_routine(size: int, dtype: torch.dtype, device: torch.device) -> TriangleRoutine | None:
    """Return the routine that computes one triangle of a product, or None where it is not installed or does not pay.

    Args:
        size: rows of the (square) result, a single matrix.
        dtype: of the operands.
        device: where they are.

    Example:
        >>> triangle_routine(64, torch.float32, torch.device("cpu")) is None
        True
    """
    return _routines().get(dtype) if size >= _SMALLEST and device.type == "cpu" else None


def _order_and_place(matrix: torch.Tensor) -> tuple[int, int, int]:
    """Return `(order, address, distance of rows)`, the latter of columns where those are contiguous."""
    if matrix.stride(1) == 1:
        return _PLAIN, matrix.data_ptr(), matrix.stride(0)
    return _TRANSPOSED, matrix.data_ptr(), matrix.stride(1)


@cache
def _routines() -> dict[torch.dtype, TriangleRoutine]:
    """Return the routine of each dtype; none where MKL is not installed, or of no use beside this torch."""
    path = _installed()
    if path is None or not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return {}
    try:
        library: Any = ctypes.CDLL(path)
        # Before any other call: MKL loads the layer it is left with, and stops the process where it finds none.
        layer = library.MKL_Set_Threading_Layer(_GNU_THREADS)
        routines = {
            torch.float32: _routine(library, "cblas_sgemmt", ctypes.c_float),
            torch.float64: _routine(library, "cblas_dgemmt", ctypes.c_double),
        }
    except (OSError, AttributeError) as error:
        return _without(str(error))
    if layer != _GNU_THREADS:
        return _without(
            f"threading layer {layer} was chosen before, where torch's threads need {_GNU_THREADS}"
        )
    if not all(_is_right(routine, dtype) for dtype, routine in routines.items()):
        return _without("it multiplies to something else than torch")
    return routines


def _installed() -> str | None:
    """Return where MKL's library lies, if the distribution is installed and made for this system."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError:
        return None
    return next((str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so")), None)


def _routine(library: Any, name: str, scalar: Any) -> TriangleRoutine:
    # MKL's integers have 32 bits or 64, as its user says; a callee that reads 32 finds them in the lower half.
    integer, address = ctypes.c_int64, ctypes.c_void_p
    multiply = library[name]
    multiply.restype = None
    multiply.argtypes = [*[integer] * 6, scalar, address, integer, address, integer, scalar, address, integer]
    return TriangleRoutine(multiply, library.MKL_Set_Num_Threads_Local)


def _is_right(routine: TriangleRoutine, dtype: torch.dtype) -> bool:
    """Return whether a product of small whole numbers, which every dtype holds exactly, comes out exactly."""
    x = (torch.arange(40 * 24) % 7 - 3).to(dtype).view(40, 24)
    out = torch.ones(40, 40, dtype=dtype)
    routine(x, x.mT, out, alpha=2.0, beta=3.0)
    expected = torch.ones_like(out).tril(-1) + (2 * x.long() @ x.long().mT + 3).triu()
    return torch.equal(out, expected.to(dtype))


def _without(reason: str) -> dict[torch.dtype, TriangleRoutine]:
    warnings.warn(f"Muon goes on without the installed MKL: {reason}", stacklevel=2)
    return {}
