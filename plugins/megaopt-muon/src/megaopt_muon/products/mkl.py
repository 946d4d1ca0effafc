"""Triangles of products on x86 processors, by the MKL that the extra `megaopt-muon[mkl]` brings.

`cblas_?gemmt` multiplies like `cblas_?gemm` but computes one triangle of the result, in little more than half the time.
The MKL inside of torch lacks it, and does not notice a second one beside it: all symbols of torch are resolved when it
is imported. The second one runs on the threads of torch's OpenMP, which must be GNU's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any, Final

import torch
from attrs import frozen

__all__ = ["TriangleRoutine", "has_triangles", "triangle_routine"]

_SMALLEST: Final = 1024
"""Rows of the smallest result for which it pays; in smaller ones copying the triangle takes what is gained."""

# Of the C interfaces of BLAS and MKL.
_ROW_MAJOR, _UPPER, _PLAIN, _TRANSPOSED = 101, 121, 111, 112
_INTEGERS_OF_32_BITS, _GNU_THREADS = 0, 3


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
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        """Compute `alpha * left @ right + beta * out` on and above the diagonal.

        Args:
            left: `[n, k]`, of strides that :func:`triangle_routine` takes, as those of the others.
            right: `[k, n]`.
            out: `[n, n]`; what lies below the diagonal stays as it is.
            alpha: on the product.
            beta: on what is there before; nothing is read if 0.
        """
        (left_order, left_pitch), (right_order, right_pitch) = _order(left), _order(right)
        before = self._use_threads(torch.get_num_threads())
        try:
            self._multiply(
                *(_ROW_MAJOR, _UPPER, left_order, right_order, *left.shape, alpha),
                *(left.data_ptr(), left_pitch, right.data_ptr(), right_pitch),
                *(beta, out.data_ptr(), out.stride(0)),
            )
        finally:
            self._use_threads(before)


def has_triangles(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether symmetric products of a size are MKL's: where it is installed and pays.

    Args:
        size: rows of the (square) result, a single matrix.
        dtype: of the operands.
        device: where they are.

    Example:
        >>> has_triangles(64, torch.float32, torch.device("cpu"))
        False
    """
    return size >= _SMALLEST and device.type == "cpu" and dtype in _routines()


def triangle_routine(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> TriangleRoutine | None:
    """Return the routine that computes one triangle of a product, or None where the product is not MKL's.

    Args:
        out: where it goes.
        left: the left operand.
        right: the right one.
    """
    if out.dim() != 2 or not has_triangles(out.shape[0], out.dtype, out.device):
        return None
    known = _order(out)[0] == _PLAIN and all(_order(operand)[0] for operand in (left, right))
    return _routines()[out.dtype] if known else None


def _order(matrix: torch.Tensor) -> tuple[int, int]:
    """Return how a matrix lies in memory, and how far apart its rows, or columns; zeros if MKL cannot read it."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    if right == 1 and down >= max(1, columns):
        return _PLAIN, down
    return (_TRANSPOSED, right) if down == 1 and right >= max(1, rows) else (0, 0)


@cache
def _routines() -> dict[torch.dtype, TriangleRoutine]:
    """Return the routine of each dtype; none where MKL is not installed, or of no use beside this torch."""
    path = _installed()
    if path is None or not _has_gnu_threads():
        return {}
    try:
        library: Any = ctypes.CDLL(path)
        # Before any other call: MKL loads the layers it is left with, and stops the process where it finds none.
        layers = (
            library.MKL_Set_Interface_Layer(_INTEGERS_OF_32_BITS),
            library.MKL_Set_Threading_Layer(_GNU_THREADS),
        )
        routines = {
            torch.float32: _routine(library, "cblas_sgemmt", ctypes.c_float),
            torch.float64: _routine(library, "cblas_dgemmt", ctypes.c_double),
        }
    except (OSError, AttributeError) as error:
        return _without(str(error))
    if layers != (_INTEGERS_OF_32_BITS, _GNU_THREADS):
        return _without(
            f"layers {layers} were chosen before, where {(_INTEGERS_OF_32_BITS, _GNU_THREADS)} are needed"
        )
    if not all(_is_right(routine, dtype) for dtype, routine in routines.items()):
        return _without("it multiplies to something else than torch")
    return routines


def _has_gnu_threads() -> bool:
    """Return whether the process runs on the OpenMP library that MKL will ask for."""
    try:
        wanted, used = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY), ctypes.CDLL(None)
        places = [ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value for library in (wanted, used)]
    except (OSError, AttributeError):
        return False
    return places[0] == places[1]


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
    integer, address = ctypes.c_int, ctypes.c_void_p
    multiply = library[name]
    multiply.restype = None
    multiply.argtypes = [*[integer] * 6, scalar, address, integer, address, integer, scalar, address, integer]
    return TriangleRoutine(multiply, library.MKL_Set_Num_Threads_Local)


def _is_right(routine: TriangleRoutine, dtype: torch.dtype) -> bool:
    """Return whether a product of small whole numbers, which every dtype holds exactly, comes out exactly."""
    x = (torch.arange(40 * 24, device="cpu") % 7 - 3).view(40, 24)
    out = torch.ones(40, 40, dtype=dtype, device="cpu")
    expected = (2 * x @ x.mT + 3).to(dtype).triu() + out.tril(-1)
    routine(x.to(dtype), x.to(dtype).mT, out, alpha=2.0, beta=3.0)
    return torch.equal(out, expected)


def _without(reason: str) -> dict[torch.dtype, TriangleRoutine]:
    warnings.warn(f"Muon goes on without the installed MKL: {reason}", stacklevel=2)
    return {}
