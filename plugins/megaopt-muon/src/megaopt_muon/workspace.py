"""Memory for intermediate matrices that is allocated once and used again by every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["Workspace"]


class Workspace:
    """Hands out tensors by name; a name's memory grows to the largest that was asked for and is then kept.

    Example:
        >>> workspace = Workspace()
        >>> small = workspace.take("x", (2, 3), torch.float32, torch.device("cpu"))
        >>> again = workspace.take("x", (3, 2), torch.float32, torch.device("cpu"))
        >>> again.data_ptr() == small.data_ptr()
        True
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised contiguous tensor; it is valid until the same name is taken again.

        Args:
            name: which memory.
            shape: of the tensor.
            dtype: of the tensor.
            device: of the tensor.
        """
        numel, key = math.prod(shape), (name, dtype, device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            flat = torch.empty(numel, dtype=dtype, device=device)
            self._flat[key] = flat
        return flat[:numel].view(tuple(shape))

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(flat.nbytes for flat in self._flat.values())
