"""Parameters as pure data: what layouts, planners and checkpoints reason about without a tensor."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from attrs import field, frozen

from megaopt_core.errors import ShardingError
from megaopt_core.params.roles import Role
from megaopt_core.params.views import MatrixView

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = ["Box", "Granularity", "ParamInfo", "ParamSpec", "Shard", "whole"]

type Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a rectangular part of a tensor."""


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
    def is_whole(self) -> bool:
        """True when the range is the whole logical tensor."""
        return self.numel == math.prod(self.shape)


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers a whole shape.

    Args:
        shape: the shape.
    """
    return (0,) * len(shape), tuple(shape)


@frozen
class ParamSpec:
    """One trainable parameter as pure data.

    Args:
        name: globally unique qualified name.
        shape: shape of the logical tensor over all tensor- and expert-parallel ranks.
        box: this rank's tensor- or expert-parallel part of `shape`.
        dtype: of the model parameter.
        grad_dtype: of its gradient.
        optimizer: name of the registered optimizer that steps it.
        group: index into the routing's groups.
        granularity: of that optimizer.
        cost: work of one step, in units that compare between parameters of one routing.
        is_expert: reduced and sharded over the expert data-parallel group.
        shared_embedding: an embedding that pipeline stages share; layouts give it a bucket of its own.
        dp_placements: of a DTensor: `(placement, mesh size)` per data-parallel dimension.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    grad_dtype: torch.dtype
    optimizer: str
    group: int
    granularity: Granularity
    cost: float
    is_expert: bool = False
    shared_embedding: bool = False
    dp_placements: tuple[tuple[Placement, int], ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        return self.box[1]

    @property
    def numel(self) -> int:
        """Elements of this rank's tensor."""
        return math.prod(self.box[1])

    def shard(self, start: int = 0, stop: int | None = None) -> Shard:
        """Return a range of this parameter's local elements, by default all of them.

        Args:
            start: first element.
            stop: one past the last; None means the end.
        """
        return Shard(self.name, self.shape, self.box, start, self.numel if stop is None else stop)


@frozen
class ParamInfo:
    """What the tensor that an inner optimizer steps carries as its `param_info` attribute.

    Args:
        name: globally unique qualified name; of a fused flat piece, that of its first member.
        role: what the parameter is.
        view: how it is seen as matrices; None when it is element-wise.
        is_expert: it belongs to an expert.
        partition_dim: dimension that tensor parallelism cuts; -1 when it does not.
        peers: ranks that step the same matrix together.
    """

    name: str
    role: Role
    view: MatrixView | None = None
    is_expert: bool = False
    partition_dim: int = -1
    peers: tuple[int, ...] = field(default=())
