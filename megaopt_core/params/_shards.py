"""Parts of a named logical tensor: boxes, ranges inside them, and how an axis of ranks cuts a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from megaopt_core.errors import ShardingError

__all__ = ["AxisPlacement", "Box", "RankCoordinates", "Shard", "intersect", "numel_of", "part_of", "whole"]

type Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular part of a tensor."""


type RankCoordinates = Mapping[str, int]
"""Where a rank stands on each axis of the world (`{"dp": 3, "tp": 0}`); an axis that is left out is at 0."""


@frozen
class Shard:
    """Part of a named logical tensor: a box, then a row-major `[start, stop)` range of elements inside the box.

    Args:
        name: globally unique qualified name.
        shape: shape of the whole logical tensor.
        box: the part of it that a rank's local tensor covers.
        start: first element of the range, counted row-major inside the box.
        stop: one past the last.

    Raises:
        ShardingError: the box leaves the shape, or the range leaves the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int

    def __attrs_post_init__(self) -> None:
        offsets, sizes = self.box
        inside = len(offsets) == len(sizes) == len(self.shape) and all(
            offset >= 0 and size >= 0 and offset + size <= extent
            for offset, size, extent in zip(offsets, sizes, self.shape, strict=True)
        )
        if not inside:
            raise ShardingError(f"Shard of {self.name!r}: box {self.box} leaves shape {self.shape}")
        if not 0 <= self.start <= self.stop <= math.prod(sizes):
            raise ShardingError(
                f"Shard of {self.name!r}: range [{self.start}, {self.stop}) leaves its box of "
                f"{math.prod(sizes)} elements"
            )

    @property
    def numel(self) -> int:
        """Number of elements in the range."""
        return self.stop - self.start

    @property
    def is_box(self) -> bool:
        """True when the range is all of the box."""
        return self.numel == numel_of(self.box)

    @property
    def is_whole(self) -> bool:
        """True when the range is the whole logical tensor."""
        return self.numel == math.prod(self.shape)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole shape.

    Args:
        shape: the shape.
    """
    return (0,) * len(shape), tuple(shape)


def numel_of(box: Box) -> int:
    """Return the number of elements in a box.

    Args:
        box: the box.
    """
    return math.prod(box[1])


def intersect(one: Box, other: Box) -> Box:
    """Return what two boxes share; sizes are 0 where they do not meet.

    Args:
        one: a box.
        other: a box of as many dimensions.

    Example:
        >>> intersect(((0, 0), (4, 2)), ((2, 0), (4, 1)))
        ((2, 0), (2, 1))
    """
    starts = tuple(max(first, second) for first, second in zip(one[0], other[0], strict=True))
    stops = (
        min(first + size, second + extent) for first, size, second, extent in zip(*one, *other, strict=True)
    )
    return starts, tuple(max(stop - start, 0) for start, stop in zip(starts, stops, strict=True))


@frozen
class AxisPlacement:
    """How the ranks along one axis of the world divide a tensor.

    Three kinds: every rank has all of it (neither `dim` nor `index`), each has a chunk along `dim`, or only the rank at
    `index` has it (an expert that lives on one expert-parallel rank).

    Args:
        axis: name of the axis.
        size: number of ranks along it.
        dim: dimension that is cut as `torch.chunk` cuts: chunks of `ceil(extent / size)`, later ones shorter or empty.
        index: the only rank that has the tensor.

    Raises:
        ShardingError: an argument is out of range, or both `dim` and `index` are given.

    Example:
        >>> AxisPlacement("tp", 4, dim=0).part(((0, 0), (6, 8)), 3)
        ((6, 0), (0, 8))
    """

    axis: str
    size: int
    dim: int | None = None
    index: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.size < 1:
            raise ShardingError(f"AxisPlacement({self.axis!r}, {self.size}): an axis has at least 1 rank")
        if self.dim is not None and self.index is not None:
            raise ShardingError(f"AxisPlacement({self.axis!r}): give dim or index, not both")
        if self.index is not None and not 0 <= self.index < self.size:
            raise ShardingError(f"AxisPlacement({self.axis!r}, {self.size}): no rank has index {self.index}")

    @property
    def divides(self) -> bool:
        """True when not every rank along the axis has all of the tensor."""
        return self.size > 1 and (self.dim is not None or self.index is not None)

    def part(self, box: Box, coordinate: int) -> Box:
        """Return the part of a box that a rank has.

        Args:
            box: what the axis divides.
            coordinate: of the rank, along the axis.

        Raises:
            ShardingError: there is no such rank.
        """
        if not 0 <= coordinate < self.size:
            raise ShardingError(f"axis {self.axis!r} has {self.size} ranks, none at {coordinate}")
        offsets, sizes = box
        if self.index is not None:
            return box if coordinate == self.index else (offsets, (0,) * len(sizes))
        if self.dim is None:
            return box
        extent = sizes[self.dim]
        length = -(-extent // self.size)
        start, stop = min(coordinate * length, extent), min((coordinate + 1) * length, extent)
        return (
            (*offsets[: self.dim], offsets[self.dim] + start, *offsets[self.dim + 1 :]),
            (*sizes[: self.dim], stop - start, *sizes[self.dim + 1 :]),
        )


def part_of(shape: Sequence[int], placements: Sequence[AxisPlacement], rank: RankCoordinates) -> Box:
    """Return a rank's part of a tensor that axes divide one after the other; it may be empty.

    Args:
        shape: of the tensor.
        placements: how each axis divides it, in the order of cutting.
        rank: the rank's coordinates.
    """
    box = whole(shape)
    for placement in placements:
        box = placement.part(box, rank.get(placement.axis, 0))
    return box
