"""States that were saved in a code: which part of what was saved together each element of a shard belongs to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from megaopt_core.params import Box, Shard, intersect

__all__ = ["CodedRun", "coded_runs"]


@frozen
class CodedRun:
    """Elements of a shard that lie one after the other in a range that was saved together.

    Args:
        start: position of the first one in the shard.
        stop: position behind the last one.
        first: position of the first one in the range.
        count: number of elements of the range.
        code: the code's name.
        values: what decodes the range, encoded.
    """

    start: int
    stop: int
    first: int
    count: int
    code: str
    values: Any


def coded_runs(codes: Sequence[Sequence[Any]], shard: Shard) -> list[CodedRun]:
    """Return where every element of a shard was saved, in the order of its elements.

    Args:
        codes: `[offsets, sizes, start, stop, code, values]` of each range: row-major elements of a box.
        shard: which elements.

    Example:
        >>> shard = Shard("w", shape=(2, 4), box=((0, 2), (2, 2)), start=0, stop=4)
        >>> [(run.start, run.stop, run.first) for run in coded_runs([[[0, 0], [2, 4], 0, 8, "scaled", {}]], shard)]
        [(0, 2, 2), (2, 4, 6)]
    """
    found = []
    for offsets, sizes, start, stop, code, values in codes:
        for here, there, length in _common_runs(shard.box, (tuple(offsets), tuple(sizes))):
            # What both the shard and the range have of this run.
            skip = max(shard.start - here, start - there, 0)
            taken = min(length, shard.stop - here, stop - there) - skip
            if taken > 0:
                at = here + skip - shard.start
                found.append(CodedRun(at, at + taken, there + skip - start, stop - start, code, values))
    return sorted(found, key=lambda run: run.start)


def _common_runs(left: Box, right: Box) -> Iterator[tuple[int, int, int]]:
    """Yield `(position in left, position in right, length)` of what two boxes share, in row-major runs of both."""
    low, sizes = intersect(left, right)
    if 0 in sizes:
        return
    dims = len(sizes)
    while dims and sizes[dims - 1] == left[1][dims - 1] == right[1][dims - 1]:
        dims -= 1
    dims = max(dims - 1, 0)  # the dimension that is cut joins the run: its elements are consecutive in both
    length = math.prod(sizes[dims:])
    rows = (range(at, at + size) for at, size in zip(low[:dims], sizes[:dims], strict=True))
    for index in itertools.product(*rows):
        corner = [*index, *low[dims:]]
        yield _position(corner, left), _position(corner, right), length


def _position(corner: Sequence[int], box: Box) -> int:
    position = 0
    for at, offset, size in zip(corner, *box, strict=True):
        position = position * size + at - offset
    return position
