"""Symmetric products by the kernels that the extra `megaopt-muon[hopper]` brings, where they run.

The extra installs gram-newton-schulz, whose kernels are those of quack: `gemm_symmetric(A, B, C, out, alpha, beta)`
computes one triangle of `alpha * A @ B + beta * C` and writes it twice.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

__all__ = ["symmetric_kernel"]

_SMALLEST = 256  # below it the kernel's tiles are mostly empty
_CAPABILITIES = (9, 10)


def symmetric_kernel(out: torch.Tensor) -> Callable[..., Any] | None:
    """Return the kernel for a symmetric product, or None where it is not installed or does not run.

    Args:
        out: where the product goes.

    Example:
        >>> symmetric_kernel(torch.empty(512, 512, dtype=torch.bfloat16)) is None  # on a CPU
        True
    """
    if out.device.type != "cuda" or out.dtype.itemsize != 2 or out.shape[-1] < _SMALLEST:
        return None
    return _installed(out.device)


@cache
def _installed(device: torch.device) -> Callable[..., Any] | None:
    if (
        importlib.util.find_spec("quack") is None
        or torch.cuda.get_device_capability(device)[0] not in _CAPABILITIES
    ):
        return None
    kernel: Callable[..., Any] = importlib.import_module("quack.gemm_interface").gemm_symmetric
    return kernel
