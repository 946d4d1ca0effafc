"""What Newton-Schulz computes in."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "at_least_float32",
    "compute_dtype",
    "has_matrix_units",
    "matmul_precision",
    "multiplies_bfloat16",
    "processor_capabilities",
]

_MATRIX_UNITS: Final = "amx_bf16"
_INSTRUCTIONS: Final = (_MATRIX_UNITS, "avx512_bf16", "avx10_2")


def compute_dtype(precision: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype that an update is iterated in.

    As for `torch.set_float32_matmul_precision`, `"medium"` allows bfloat16 where that is fast, and asks for no less
    precision than is: on a processor that cannot multiply bfloat16 the iteration runs in float32, which takes a quarter
    of the time there.

    Args:
        precision: `"medium"`, `"high"` or `"highest"`.
        dtype: of the update.
        device: where it is.

    Example:
        >>> compute_dtype("highest", torch.bfloat16, torch.device("cpu"))
        torch.float32
    """
    if precision == "medium":
        return torch.bfloat16 if device.type != "cpu" or multiplies_bfloat16() else torch.float32
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


@cache
def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions that multiply bfloat16.

    Of x86 processors it is known. Others are taken to have them, as is any where torch is too old to be asked.
    """
    capabilities = processor_capabilities()
    if capabilities.get("architecture") != "x86_64":
        return True
    return any(capabilities.get(name) for name in _INSTRUCTIONS)


@cache
def has_matrix_units() -> bool:
    """Return whether the processor multiplies bfloat16 in matrix units, not in vectors.

    Of x86 processors it is known, others are taken to, as any is where torch is too old to be asked.
    """
    capabilities = processor_capabilities()
    return capabilities.get("architecture") != "x86_64" or bool(capabilities.get(_MATRIX_UNITS))


def processor_capabilities() -> Mapping[str, Any]:
    """Return what torch tells of the processor; nothing where it is too old to be asked."""
    ask = getattr(torch.cpu, "get_capabilities", None)
    return ask() if ask is not None else {}


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype, or float32 in the place of a narrower one.

    Args:
        dtype: a floating-point dtype.

    Example:
        >>> at_least_float32(torch.bfloat16), at_least_float32(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Return a context in which float32 products are TF32 under `"high"`, where there is, and else float32.

    Products of float16 are added up in float32, also where a training allows its own to be added up in float16: squares
    of Gram matrices leave its range.

    Args:
        precision: `"medium"`, `"high"` or `"highest"`.
    """
    name, before = "high" if precision == "high" else "highest", torch.get_float32_matmul_precision()
    cublas = torch.backends.cuda.matmul
    narrow: bool = cublas.allow_fp16_accumulation
    if before == name and not narrow:
        yield
        return
    torch.set_float32_matmul_precision(name)
    cublas.allow_fp16_accumulation = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        cublas.allow_fp16_accumulation = narrow
