"""Symmetric products by the kernels that the extra `megaopt-muon[hopper]` brings, where they run.

The extra installs gram-newton-schulz, whose kernels are those of quack: `gemm_symmetric(A, B, C, out, alpha, beta)`
computes one triangle of `alpha * A @ B + beta * C` and writes it twice. They are compiled for operands that are read 16
bytes at a time: all strides but the one of 1 must be multiples of that.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import cache
from importlib import metadata
from typing import Any

import torch

__all__ = ["kernel_share", "symmetric_kernel"]

_SMALLEST = 256  # below it the kernel's tiles are mostly empty
_FEWEST = (
    6e10  # operations of a whole product: of fewer, a call takes longer than the product (90 microseconds)
)
_SHARE = 0.7  # of a whole product's time, on an H100
_ALIGNMENT = 16  # bytes
_CAPABILITIES = (9, 10)

type Kernel = Callable[..., Any]


def symmetric_kernel(out: torch.Tensor, *operands: torch.Tensor) -> Kernel | None:
    """Return the kernel for a symmetric product, or None where it is not installed or does not run.

    Args:
        out: where the product goes.
        *operands: what is multiplied, from the left first, and added.

    Example:
        >>> x = torch.empty(512, 512, dtype=torch.bfloat16)
        >>> symmetric_kernel(x, x, x) is None  # on a CPU
        True
    """
    if out.dtype.itemsize != 2 or out.shape[-1] < _SMALLEST:
        return None
    if 2.0 * out.numel() * operands[0].shape[-1] < _FEWEST:
        return None
    return _kernel_of(out.device) if all(map(_is_aligned, (out, *operands))) else None


def kernel_share(device: torch.device) -> float:
    """Return the part of a whole product's time that a large symmetric one takes: 1 without the kernel.

    Args:
        device: where it is made.
    """
    return 1.0 if _kernel_of(device) is None else _SHARE


def _is_aligned(tensor: torch.Tensor) -> bool:
    step = _ALIGNMENT // tensor.dtype.itemsize
    *others, fastest = sorted(tensor.stride(), reverse=True)
    return fastest == 1 and not any(distance % step for distance in (*others, tensor.storage_offset()))


@cache
def _kernel_of(device: torch.device) -> Kernel | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _CAPABILITIES:
        return None
    return _installed()


@cache
def _installed() -> Kernel | None:
    try:
        metadata.version("quack-kernels")
    except metadata.PackageNotFoundError:
        return None
    try:
        kernel: Kernel = importlib.import_module("quack.gemm_interface").gemm_symmetric
    except (ImportError, AttributeError) as error:
        warnings.warn(f"Muon goes on without the kernels of quack-kernels, which fail: {error}", stacklevel=2)
        return None
    return kernel
