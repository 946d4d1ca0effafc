"""Products in float32 by oneDNN, on processors where the matrix library that torch multiplies with is slower.

torch's own products in float32 are MKL's, which on other makers' processors stay with vectors of 256 bits where there
are 512. oneDNN, which torch contains as well, does not, and is reached by the operator that `torch.compile` takes for
linear layers: `left @ right.mT`.

Its kernels add up a whole row in one sum, whose rounding is twice as large at a depth of 2,000 as that of sums of 192,
MKL's. So products are cut to such depths. What is multiplied from the right must lie in memory without gaps, or a
reference implementation takes over that is a thousand times slower: matrices are kept in blocks of columns. And a
kernel is compiled for each shape, of which oneDNN keeps some 500: matrices are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Final

import torch

__all__ = [
    "column_blocks",
    "cuts",
    "filled_up",
    "is_multiplied",
    "joined_columns",
    "next_blocks",
    "onednn_height",
    "sum_of_products",
    "with_product",
]

_SMALLEST: Final = 128
"""Rows from which on a product takes less time: a call takes ten microseconds, before it multiplies."""

_DEPTH: Final = 192
"""Terms of one sum in products of small matrices."""

_WIDTH: Final = 256
"""Columns of a block: of Gram matrices of 128 rows the terms of one sum, and a seventh fewer calls than 192."""

_HEIGHTS: Final = ((224, 160), (288, 224))
"""Heights of the block rows that symmetric products are computed in, about, and Gram matrices, whose copies are fewer:
of one thread, and of several, each of which has a part of them."""

_GRANULE: Final = 16
"""Rows and columns are filled up to multiples of it: a vector. 126 distinct shapes between 64 and 512 then need a third
of the kernels."""

type _Operation = Callable[..., torch.Tensor]


def is_multiplied(size: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN can make products of a size, and its calls take less time than that.

    Args:
        size: rows of the smaller matrices.
        dtype: of the operands.
        device: where they are.

    Example:
        >>> is_multiplied(64, torch.float32, torch.device("cpu"))
        False
    """
    fits = size >= _SMALLEST and dtype is torch.float32 and device.type == "cpu"
    return fits and _operation() is not None


def onednn_height(size: int, *, gram: bool = False) -> int:
    """Return the height of the block rows that a symmetric product is computed in; its size where one call is faster.

    Args:
        size: rows of the result.
        gram: it is a Gram matrix.

    Example:
        >>> onednn_height(256)
        256
    """
    height = _HEIGHTS[min(torch.get_num_threads(), 2) - 1][gram]
    return -(-size // max(1, round(size / height)))


@lru_cache(maxsize=4096)
def cuts(length: int, most: int = _DEPTH) -> tuple[tuple[int, int], ...]:
    """Return where to cut a length into about equal parts.

    Args:
        length: of the whole.
        most: of a part.

    Example:
        >>> cuts(400)
        ((0, 134), (134, 268), (268, 400))
    """
    step = -(-length // max(1, -(-length // most)))
    return tuple((start, min(start + step, length)) for start in range(0, length, step))


def filled_up(length: int) -> int:
    """Return a number of rows or columns, or the next larger one of which there are kernels.

    Args:
        length: the number.

    Example:
        >>> filled_up(200), filled_up(208)
        (208, 208)
    """
    return -(-length // _GRANULE) * _GRANULE


def column_blocks(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return blocks of columns, each without gaps in memory, filled up with zeros.

    Args:
        matrix: `[n, k]`, of any strides; one block of it may be returned as it is.
    """
    rows, columns = matrix.shape
    blocks = []
    for start, stop in cuts(columns, _WIDTH):
        part = matrix[:, start:stop]
        filled = filled_up(rows), filled_up(stop - start)
        if part.shape == filled:
            blocks.append(part.contiguous())
        else:
            blocks.append(part.new_zeros(filled))
            blocks[-1][:rows, : stop - start].copy_(part)
    return blocks


def joined_columns(blocks: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write a matrix that lies in blocks, without what it was filled up with.

    Args:
        blocks: as :func:`column_blocks` returns them.
        out: `[n, k]`, of any strides.
    """
    rows, columns = out.shape
    for (start, stop), block in zip(cuts(columns, _WIDTH), blocks, strict=True):
        out[:, start:stop].copy_(block[:rows, : stop - start])


def sum_of_products(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the sum of `left @ right.mT`, as a new tensor.

    Args:
        pairs: at least one `(left, right)` of `[n, k]` and `[m, k]`; the right one, or its transpose, is contiguous.

    Example:
        >>> eye = torch.eye(2)
        >>> sum_of_products([(eye, eye), (eye, 2.0 * eye)]).tolist()
        [[3.0, 0.0], [0.0, 3.0]]
    """
    multiply = _operation()
    if multiply is None:
        raise RuntimeError("this torch has no products of oneDNN's")  # is_multiplied says so
    # One operation that multiplies and adds takes as long, and is compiled besides.
    first, *others = (multiply(left, right, None, "none", [], "") for left, right in pairs)
    for product in others:
        first.add_(product)
    return first


def with_product(q: float, m: torch.Tensor, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Return `(q I + factor m) x`, as a new tensor.

    Args:
        q: the multiple of the identity.
        m: `[n, n]`.
        x: `[n, k]`, contiguous.
        factor: on the product; nothing is multiplied where it is 0.

    Example:
        >>> with_product(2.0, torch.eye(2), torch.ones(2, 3)).tolist()
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    """
    if factor == 0.0:
        return x * q
    product = sum_of_products((m[:, start:stop], x[start:stop].mT) for start, stop in cuts(m.shape[0]))
    if factor != 1.0:
        product.mul_(factor)
    return product.add_(x, alpha=q)


def next_blocks(
    blocks: Sequence[torch.Tensor], triple: tuple[float, float, float], gram: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return the blocks of `a X + (b A + c A^2) X`, where `A = X X^T` is small enough to be one product.

    Args:
        blocks: of columns of `X`, each contiguous.
        triple: `(a, b, c)`.
        gram: `A`, where it is known.
    """
    a, b, c = triple
    if gram is None:
        gram = sum_of_products(zip(blocks, blocks, strict=True))
    m = with_product(b, gram, gram, c)
    return [with_product(a, m, block) for block in blocks]


def _operation() -> _Operation | None:
    """Return the operator; None where this torch lacks it, or it does something else."""
    try:
        return _tried_operation()
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of another version of torch
        return None


@cache
def _tried_operation() -> _Operation:
    """Return the operator once it has multiplied rightly. That it has not may be a mode that tensors are made in.

    Raises:
        RuntimeError: it is not there, or does something else.
    """
    if torch.backends.mkldnn.is_available():
        operation: _Operation = torch.ops.mkldnn._linear_pointwise.default
        if _is_right(operation):
            return operation
    raise RuntimeError("no products of oneDNN's")


def _is_right(multiply: _Operation) -> bool:
    """Return whether products of small whole numbers, which float32 holds exactly, come out exactly."""
    numbers = (torch.arange(96 * 40, device="cpu") % 7 - 3).float().view(96, 40)
    left, right = numbers[:, 8:], numbers[:32, :32].contiguous()
    expected = left @ right.mT
    ways = (right, right.mT.contiguous().mT)
    return all(torch.equal(multiply(left, way, None, "none", [], ""), expected) for way in ways)
