"""Parameters as pure data: what routing and layouts know of each, and what an inner optimizer may read."""

from __future__ import annotations

import math
from enum import StrEnum

import torch
from attrs import frozen

from megaopt_core.params._roles import Role
from megaopt_core.params._shards import AxisPlacement, Box, RankCoordinates, Shard, numel_of, part_of
from megaopt_core.params._views import MatrixView

__all__ = ["DEFAULT_ALIGNMENT", "Granularity", "ParamInfo", "ParamSpec", "PeerGroup"]


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
        return part_of(self.shape, self.placements, rank)

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

    group: torch.distributed.ProcessGroup
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
        shape: of the whole logical tensor; in a split step of what is transformed, maybe some matrices of a batch.
        group: position of its group in the inner optimizer's `param_groups`.
        offsets: where `shape` begins in the parameter; empty where it is all of it.
    """

    name: str
    role: Role
    view: MatrixView | None = None
    is_expert: bool = False
    partition_dim: int = -1
    peers: PeerGroup | None = None
    shape: tuple[int, ...] = ()
    group: int = 0
    offsets: tuple[int, ...] = ()
