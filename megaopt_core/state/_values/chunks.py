"""Flat ranges of a logical tensor as boxes: what torch.distributed.checkpoint can store and find again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attrs import frozen

from megaopt_core.params._shards import Shard

__all__ = ["Chunk", "chunks_of"]


@frozen
class Chunk:
    """A box of a logical tensor, and the flat range of local elements that fills it in row-major order.

    Args:
        offsets: where the box begins in the logical tensor.
        sizes: its extents.
        start: first element, counted from the first element of the shard.
        stop: one past the last.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def chunks_of(shard: Shard) -> list[Chunk]:
    """Return the fewest boxes whose elements, one box after the other, are the shard's range.

    A row-major range of a tensor of `n` dimensions needs at most `2 n - 1` boxes: what remains of the first row, whole
    rows, the beginning of the last row, each of the two ends cut in the same way one dimension further in.

    Args:
        shard: a range of elements of a named tensor; an empty one has no boxes, unless its tensor is empty too.

    Example:
        >>> shard = Shard("w", shape=(4, 3), box=((0, 0), (4, 3)), start=2, stop=10)
        >>> [(chunk.offsets, chunk.sizes) for chunk in chunks_of(shard)]
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    corner, sizes = shard.box
    if math.prod(sizes) == 0:
        return [Chunk(corner, sizes, 0, 0)]
    chunks = []
    for offsets, extents, start in _boxes(sizes, shard.start, shard.stop):
        moved = tuple(at + inside for at, inside in zip(corner, offsets, strict=True))
        first = start - shard.start
        chunks.append(Chunk(moved, extents, first, first + math.prod(extents)))
    return chunks


def _boxes(
    sizes: Sequence[int], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield `(offsets, sizes, first element)` of each box, in row-major order."""
    if start >= stop:
        return
    if not sizes:
        yield (), (), start
        return
    row_size = math.prod(sizes[1:])
    first, last = -(-start // row_size), stop // row_size
    if first > last:
        yield from _inside_row(sizes, start // row_size, start, stop)
        return
    if start < first * row_size:
        yield from _inside_row(sizes, first - 1, start, first * row_size)
    if first < last:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:]), first * row_size
    if last * row_size < stop:
        yield from _inside_row(sizes, last, last * row_size, stop)


def _inside_row(
    sizes: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    begin = row * math.prod(sizes[1:])
    for offsets, extents, first in _boxes(sizes[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *extents), first + begin
