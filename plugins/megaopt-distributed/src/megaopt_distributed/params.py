"""This rank's live slices of one inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from megaopt_core.sharding import Piece, PieceSpec, ShardedParams
from megaopt_distributed.memory import FlatMemory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistributedParams"]


@define(eq=False)
class DistributedParams(ShardedParams):
    """Pieces that are slices of flat memory, which all optimizers of the model share.

    Args:
        memory: the flat memory.
        specs: this rank's pieces.
        groups: the groups that are stepped here, on any rank.
        stats_group: norms and counts add up over it.

    A unit is a bucket: `units` lists the pieces in each that has parameters of `groups`, on any rank.
    """

    memory: FlatMemory
    specs: Sequence[PieceSpec]
    groups: tuple[int, ...]
    stats_group: ProcessGroup | None
    pieces: Sequence[Piece] = field(init=False)
    units: Sequence[Sequence[int]] = field(init=False)
    _buckets: Sequence[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pieces = [self.memory.piece(spec) for spec in self.specs]
        gathering = self.memory.gathering
        self._buckets = gathering.buckets_with(self.groups)
        places = [gathering.bucket_at(spec) for spec in self.specs]
        self.units = [
            [index for index, place in enumerate(places) if place == bucket] for bucket in self._buckets
        ]

    def collect_grads(self) -> None:
        """Wait for reductions and set every piece's gradient."""
        self.memory.finish_grad_sync()
        for piece in self.pieces:
            piece.grad = self.memory.grad(piece)

    def take_model_values(self) -> None:
        """Nothing to bring: the pieces are the model's memory."""

    def start_param_sync(self) -> None:
        """Begin to gather the buckets of which every optimizer has stepped its part."""
        for bucket in self._buckets:
            self.memory.gathering.stepped(bucket, self.groups)

    def start_unit_sync(self, unit: int) -> None:
        """Begin to gather a bucket, if every optimizer has stepped its part of it.

        Args:
            unit: position of the bucket in `units`.
        """
        self.memory.gathering.stepped(self._buckets[unit], self.groups)

    def finish_param_sync(self) -> None:
        """Return when the gathered parameters may be read, or when the forward pass will wait for them."""
        self.memory.finish_param_sync()
