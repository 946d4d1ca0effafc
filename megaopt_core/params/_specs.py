"""Parameters as pure data: what layouts, planners and checkpoints reason about without a tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from attrs import frozen

from megaopt_core.errors import ShardingError
from megaopt_core.params._roles import Role
from megaopt_core.params._views import MatrixView

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DEFAULT_ALIGNMENT",
    "AxisPlacement",
    "Box",
    "Granularity",
    "ParamInfo",
    "ParamSpec",
    "PeerGroup",
    "RankCoordinates",
    "Shard",
    "intersect",
    "numel_of",
    "whole",
]

type Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular part of a tensor."""

type RankCoordinates = Mapping[str, int]
"""Where a rank stands on each axis of the world (`{"dp": 3, "tp": 0}`); an axis that is left out is at 0."""


DEFAULT_ALIGNMENT = 8
"""Elements that cuts are aligned to: element-wise kernels give the same bits on both sides of such a cut."""


_MODEL_AXES = ("tp", "expert_tp", "ep", "pp")
"""The axes that divide the model itself."""


class Granularity(StrEnum):
    """How finely an optimizer's work may be cut.

    `ELEMENT`: any slice at a multiple of the entry's alignment (Adam, SGD, Lion). `TENSOR`: whole tensors (Muon,
    SOAP). `GROUP`: all parameters of a group on one rank (Prodigy).
    """

    ELEMENT = "element"
    TENSOR = "tensor"
    GROUP = "group"


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


@frozen
class ParamSpec:
    """One trainable parameter as pure data, the same on every rank, whether it has the parameter or not.

    Args:
        name: globally unique qualified name.
        shape: shape of the logical tensor over all ranks that hold parts of it.
        dtype: of the model parameter.
        grad_dtype: of its gradient.
        optimizer: name of the registered optimizer that steps it.
        group: index into the routing's groups.
        granularity: of that optimizer.
        cost: work of one step of the whole tensor, in units that compare between parameters of one routing.
        alignment: cuts that a strategy makes inside a rank's part fall on multiples of this many elements.
        view: how the logical tensor is seen as matrices; None when it is element-wise.
        placements: how each axis divides it, in the order of cutting; axes that are left out have it whole.
        is_expert: reduced and sharded over the expert data-parallel group.
        shared_embedding: an embedding that pipeline stages share; layouts give it a bucket of its own.
        splits: its optimizer offers its step in three parts, of which two may run on any slice.
        takes_peers: its optimizer lets several ranks step parts of one tensor together.
        peers: how many ranks were asked to; None: a strategy chooses.

    Example:
        >>> cut = AxisPlacement("tp", 2, dim=0)
        >>> spec = ParamSpec(
        ...     "w", (5, 4), torch.float32, torch.float32, "adam", 0, Granularity.ELEMENT, 20.0, placements=(cut,)
        ... )
        >>> spec.box({"tp": 1})
        ((3, 0), (2, 4))
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad_dtype: torch.dtype
    optimizer: str
    group: int
    granularity: Granularity
    cost: float
    alignment: int = DEFAULT_ALIGNMENT
    view: MatrixView | None = None
    placements: tuple[AxisPlacement, ...] = ()
    is_expert: bool = False
    shared_embedding: bool = False
    splits: bool = False
    takes_peers: bool = False
    peers: int | None = None

    @property
    def numel(self) -> int:
        """Elements of the whole logical tensor."""
        return math.prod(self.shape)

    @property
    def data_axis(self) -> str:
        """The axis that shares the parameter's optimizer out: `"dp"`, or `"expert_dp"` for expert parameters."""
        return "expert_dp" if self.is_expert else "dp"

    @property
    def dividing(self) -> tuple[AxisPlacement, ...]:
        """The placements of axes whose ranks do not all have the whole tensor."""
        return tuple(placement for placement in self.placements if placement.divides)

    @property
    def divided_over_data(self) -> tuple[AxisPlacement, ...]:
        """The placements of axes that divide it without dividing the model: data parallelism has cut it already."""
        return tuple(placement for placement in self.dividing if placement.axis not in _MODEL_AXES)

    def box(self, rank: RankCoordinates) -> Box:
        """Return a rank's part of the logical tensor, which may be empty.

        Args:
            rank: the rank's coordinates.
        """
        box = whole(self.shape)
        for placement in self.placements:
            box = placement.part(box, rank.get(placement.axis, 0))
        return box

    def held_by(self, rank: RankCoordinates) -> bool:
        """Return whether a rank has the parameter: some elements of it, or, where it has none at all, its name.

        A scalar has no part that could be empty: of an expert's or a stage's, this alone tells.

        Args:
            rank: the rank's coordinates.

        Example:
            >>> stage = AxisPlacement("pp", 2, index=1)
            >>> gain = ParamSpec(
            ...     "gain", (), torch.float32, torch.float32, "adam", 0, Granularity.ELEMENT, 1.0, placements=(stage,)
            ... )
            >>> gain.held_by({"pp": 0}), gain.held_by({"pp": 1})
            (False, True)
        """
        for placement in self.placements:
            if placement.index is not None and rank.get(placement.axis, 0) != placement.index:
                return False
        return not self.numel or numel_of(self.box(rank)) > 0

    def shard(self, rank: RankCoordinates, start: int = 0, stop: int | None = None) -> Shard:
        """Return a range of the elements that a rank has, by default all of them.

        Args:
            rank: the rank's coordinates.
            start: first element, counted row-major inside the rank's part.
            stop: one past the last; None means the end.
        """
        box = self.box(rank)
        if stop is None:
            stop = numel_of(box) if self.held_by(rank) else start
        return Shard(self.name, self.shape, box, start, stop)

    def part(self, box: Box) -> Shard:
        """Return any box of the logical tensor as a shard.

        Args:
            box: offsets and sizes inside `shape`.
        """
        return Shard(self.name, self.shape, box, 0, numel_of(box))


@frozen(eq=False)
class PeerGroup:
    """The ranks that step parts of one tensor together.

    Args:
        group: their process group, in the order of their parts.
        dim: dimension of the logical tensor along which it is cut into their parts.
    """

    group: ProcessGroup
    dim: int


@frozen
class ParamInfo:
    """What the tensor that an inner optimizer steps carries as its `param_info` attribute.

    Args:
        name: globally unique qualified name; of a fused flat piece, that of its first member.
        role: what the parameter is.
        view: how it is seen as matrices; None when it is element-wise.
        is_expert: it belongs to an expert.
        partition_dim: dimension that tensor parallelism cuts; -1 when it does not.
        peers: the ranks that step parts of the same tensor together; None when this rank steps alone.
        shape: of the whole logical tensor.
        group: position of its group in the inner optimizer's `param_groups`.
    """

    name: str
    role: Role
    view: MatrixView | None = None
    is_expert: bool = False
    partition_dim: int = -1
    peers: PeerGroup | None = None
    shape: tuple[int, ...] = ()
    group: int = 0
