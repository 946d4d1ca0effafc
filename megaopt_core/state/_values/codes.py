"""States that were saved in a code: which part of what was saved together each element of a shard belongs to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

from megaopt_core.params._shards import Box, Shard, intersect
from megaopt_core.precision._state_codes import SCALED, scale_key

__all__ = ["CodedRun", "coded_runs", "with_named_codes"]


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


def with_named_codes(parameters: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the parameters of a checkpoint of format 1 as later formats describe them.

    Format 1 kept the scale of a state as a state of its own, named after it.

    Args:
        parameters: name to what was saved of its state; it is not changed.
    """
    return {
        name: {**described, "state": _named(described["state"], described["shape"])}
        for name, described in parameters.items()
    }


def _named(state: Mapping[str, Any], shape: Sequence[int]) -> dict[str, Any]:
    scales = {
        key: scale_key(key)
        for key in state
        if "tensor" in state[key] and {"value", "ranges"} & set(state.get(scale_key(key), ()))
    }
    named = {key: record for key, record in state.items() if key not in scales.values()}
    for key, scale in scales.items():
        record = state[scale]
        everywhere = [[0] * len(shape), list(shape), 0, math.prod(shape)]
        ranges = record.get("ranges", [[*everywhere, record.get("value")]])
        codes = [[*where, SCALED, {"scale": value}] for *where, value in ranges]
        named[key] = {**state[key], "codes": codes}
    return named
