"""The precision of float32 products."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["matmul_precision"]


@contextmanager
def matmul_precision(precision: str) -> Iterator[None]:
    """Return a context in which float32 products have a precision that torch's global setting names.

    Args:
        precision: `"highest"`, `"high"` or `"medium"`, as of `torch.set_float32_matmul_precision`.

    Example:
        >>> before = torch.get_float32_matmul_precision()
        >>> with matmul_precision("high"):
        ...     torch.get_float32_matmul_precision()
        'high'
        >>> torch.get_float32_matmul_precision() == before
        True
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
