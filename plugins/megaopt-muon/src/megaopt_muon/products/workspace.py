"""Memory for intermediate matrices that is allocated once and used again by every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, override

import torch

from megaopt_muon.products.panels import SymmetricMatrix

__all__ = ["Workspace"]

_SAME_CACHE_SET = 1024
"""Bytes: rows that lie a multiple of it apart share few sets of a processor's cache and drive each other out."""

_CACHE_LINE = 64
"""Bytes. Of 16 bits, rows that lie an odd number of lines apart are multiplied 5 to 15 percent faster than an even one,
and up to a half faster than rows that begin inside a line."""

_SMALLEST = 256
"""Smaller matrices fit into the cache wherever their rows lie."""

type _Key = tuple[str, torch.dtype, torch.device]


class Workspace:
    """Hands out tensors by name; a name's memory grows to the largest that was asked for and is then kept.

    Of an accelerator nothing is kept: its allocator hands memory out again by itself, and between steps activations and
    gradients use it.

    Example:
        >>> workspace = Workspace()
        >>> small = workspace.take("x", (2, 3), torch.float32, torch.device("cpu"))
        >>> again = workspace.take("x", (3, 2), torch.float32, torch.device("cpu"))
        >>> again.data_ptr() == small.data_ptr()
        True
    """

    def __init__(self) -> None:
        self._flat: dict[_Key, torch.Tensor] = {}
        self._views: dict[_Key, dict[tuple[Any, ...], torch.Tensor]] = {}
        self._symmetric: dict[_Key, dict[tuple[Any, ...], SymmetricMatrix]] = {}

    @override
    def __reduce__(self) -> tuple[type[Workspace], tuple[()]]:
        """Return how a copy is made: it has memory of its own, once it is asked for."""
        return Workspace, ()

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        dense: bool = False,
        odd_lines: bool = False,
    ) -> torch.Tensor:
        """Return an uninitialised tensor; on a CPU it is valid until the same name is taken again.

        Rows are contiguous. On a CPU there may be a gap of less than two cache lines between them.

        Args:
            name: which memory.
            shape: of the tensor; at least one dimension.
            dtype: of the tensor.
            device: of the tensor.
            dense: leave no gaps.
            odd_lines: rows of a large matrix begin an odd number of cache lines apart.
        """
        if device.type != "cpu":
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        key, wanted = (name, dtype, device), (*shape, dense, odd_lines)
        views = self._views.setdefault(key, {})
        view = views.get(wanted)
        if view is not None:
            return view
        *lengths, columns = shape
        pitch = columns if dense else _pitch(shape, dtype, device, odd_lines=odd_lines)
        numel = math.prod(lengths) * pitch
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            flat = self._flat[key] = torch.empty(numel, dtype=dtype, device=device)
            self._symmetric.pop(key, None)
            views.clear()
        view = views[wanted] = flat[:numel].view(*lengths, pitch)[..., :columns]
        return view

    def take_symmetric(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        onednn: bool = False,
        size: int | None = None,
    ) -> SymmetricMatrix:
        """Return an uninitialised matrix that will be symmetric, on the same terms as :meth:`take`.

        Args:
            name: which memory.
            shape: `[*batch, n, n]`.
            dtype: of the matrix.
            device: of the matrix.
            onednn: the products that give it are oneDNN's.
            size: rows that are not filled up with zeros; None: all.
        """
        values = self.take(name, shape, dtype, device, dense=onednn)
        if device.type != "cpu":
            return SymmetricMatrix(values)
        known = self._symmetric.setdefault((name, dtype, device), {})
        # Of how many rows are multiplied at a time, the number of threads says something as well.
        kind = (*values.shape, onednn, size, torch.get_num_threads())
        matrix = known.get(kind)
        if matrix is None:
            matrix = known[kind] = SymmetricMatrix(values, onednn, size)
        return matrix

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(flat.nbytes for flat in self._flat.values())


def _pitch(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, odd_lines: bool) -> int:
    """Return how many elements lie between the beginnings of two rows."""
    columns = shape[-1]
    row = columns * dtype.itemsize
    if device.type != "cpu" or min(shape[-2:]) < _SMALLEST:
        return columns
    if odd_lines:
        return (-(-row // _CACHE_LINE) | 1) * _CACHE_LINE // dtype.itemsize
    return columns + _CACHE_LINE // dtype.itemsize if row % _SAME_CACHE_SET == 0 else columns
