"""What Newton-Schulz computes in."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["compute_dtype", "matmul_precision", "multiplies_bfloat16"]

_INSTRUCTIONS: Final = ("avx512_bf16", "amx_bf16", "avx10_2")


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
    ask = getattr(torch.cpu, "get_capabilities", None)
    capabilities = ask() if ask is not None else {}
    if capabilities.get("architecture") != "x86_64":
        return True
    return any(capabilities.get(name) for name in _INSTRUCTIONS)


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Return a context in which float32 products are TF32 under `"high"`, where there is, and else float32.

    Args:
        precision: `"medium"`, `"high"` or `"highest"`.
    """
    name = "high" if precision == "high" else "highest"
    before = torch.get_float32_matmul_precision()
    if before == name:
        yield
        return
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
