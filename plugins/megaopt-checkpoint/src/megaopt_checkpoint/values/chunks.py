"""Flat ranges of a logical tensor as boxes: what torch.distributed.checkpoint can store and find again."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import frozen

from megaopt_core.params import Box, Shard

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
    chunks, start = [], 0
    for offsets, extents in _boxes(sizes, shard.start, shard.stop):
        moved = tuple(at + inside for at, inside in zip(corner, offsets, strict=True))
        stop = start + math.prod(extents)
        chunks.append(Chunk(moved, extents, start, stop))
        start = stop
    return chunks


def _boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a range, in row-major order; none of an empty one."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row_size = math.prod(sizes[1:])
    first, last = -(-start // row_size), stop // row_size
    if first > last:
        yield from _inside_row(sizes, last, start, stop)
        return
    yield from _inside_row(sizes, first - 1, start, first * row_size)
    if first < last:
        yield (first, *[0] * (len(sizes) - 1)), (last - first, *sizes[1:])
    yield from _inside_row(sizes, last, last * row_size, stop)


def _inside_row(sizes: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    begin = row * math.prod(sizes[1:])
    for offsets, extents in _boxes(sizes[1:], start - begin, stop - begin):
        yield (row, *offsets), (1, *extents)
