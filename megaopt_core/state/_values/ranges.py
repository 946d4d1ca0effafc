"""Numbers of a state: one for a whole parameter, or one for each range of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params._shards import Shard

__all__ = ["distinct_values", "ranges_of"]


def ranges_of(record: Mapping[str, Any], shard: Shard) -> list[tuple[int, int, Any]]:
    """Return `(start, stop, value)` for the elements of a shard, counted from its first.

    Args:
        record: `{"value": v}`, or `{"ranges": [[offsets, sizes, start, stop, v], ...]}`.
        shard: which elements.

    Raises:
        CheckpointMismatchError: the values belong to another tensor- or expert-parallel part of the parameter.

    Example:
        >>> shard = Shard("w", shape=(8,), box=((0,), (8,)), start=2, stop=6)
        >>> ranges_of({"ranges": [[[0], [8], 0, 4, 0.5], [[0], [8], 4, 8, 2.0]]}, shard)
        [(0, 2, 0.5), (2, 4, 2.0)]
    """
    if "value" in record:
        return [(0, shard.numel, record["value"])]
    found = []
    for offsets, sizes, start, stop, value in record["ranges"]:
        if (tuple(offsets), tuple(sizes)) != shard.box:
            raise CheckpointMismatchError(
                f"a number in the state of {shard.name!r} differs over its parallel parts, which are cut otherwise "
                "here",
                names=[shard.name],
            )
        first, last = max(start, shard.start), min(stop, shard.stop)
        if first < last:
            found.append((first - shard.start, last - shard.start, value))
    return sorted(found, key=lambda entry: entry[:2])


def distinct_values(record: Mapping[str, Any], shard: Shard) -> list[Any]:
    """Return the values that a shard's elements have; one, where the number belongs to the whole parameter.

    Args:
        record: as for :func:`ranges_of`.
        shard: which elements.
    """
    values: list[Any] = []
    for _, _, value in ranges_of(record, shard):
        if value not in values:
            values.append(value)
    return values
