"""This rank's live matrices of one inner optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field
from megaopt_distributed import FlatMemory

from megaopt_core.sharding import Piece, PieceSpec, ShardedParams, Travel
from megaopt_layerwise.cut_tensors import CutTensors
from megaopt_layerwise.peer_parts import PeerParts
from megaopt_layerwise.routes import Route

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LayerWiseParams"]


@define(eq=False)
class LayerWiseParams(ShardedParams):
    """Matrices that this rank owns, or its parts of them: ranges of flat memory, and what has memory of its own.

    Units are first what has memory of its own, in as many batches as its values come back in, then the buckets. Values
    are on their way back while later units are stepped, and must be there before anything is gathered.

    Args:
        memory: the flat memory, which all optimizers of the model share.
        cut: the matrices that another axis cuts.
        parts: the columns that this rank steps with peers.
        specs: this rank's pieces.
        groups: the groups that are stepped here, on any rank.
        stats_group: norms and counts add up over it.
        routes: name to who owns a matrix, for reports.
    """

    takes_values_together = True
    memory: FlatMemory
    cut: CutTensors
    parts: PeerParts
    specs: Sequence[PieceSpec]
    groups: tuple[int, ...]
    stats_group: ProcessGroup | None
    routes: Mapping[str, Route]
    pieces: Sequence[Piece] = field(init=False)
    units: Sequence[Sequence[int]] = field(init=False)
    _buckets: Sequence[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pieces = [
            self.cut.pieces.get(spec) or self.parts.pieces.get(spec) or self.memory.piece(spec)
            for spec in self.specs
        ]
        gathering = self.memory.gathering
        self._buckets = gathering.buckets_with(self.groups)
        places = [self._place(spec) for spec in self.specs]
        batches = [(None, batch) for batch in range(self.cut.batches)]
        self.units = [
            [index for index, place in enumerate(places) if place == unit]
            for unit in (*batches, *((bucket, 0) for bucket in self._buckets))
        ]

    @property
    def brought_together(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        """The parts of cut matrices that come back to this rank, and its rows of those that peers share."""
        return [*self.cut.held(), *self.parts.held()]

    def _place(self, spec: PieceSpec) -> tuple[int | None, int]:
        """Return the bucket that a piece lies in, or None and the batch that it comes back in."""
        bucket = self.memory.gathering.bucket_at(spec)
        return bucket, self.cut.batch_of(spec) if bucket is None else 0

    def collect_grads(self) -> None:
        """Wait for reductions, and bring the parts of gradients to their owners."""
        self.memory.finish_grad_sync()
        for piece in self.pieces:
            if piece.spec.buffer is not None:
                piece.grad = self.memory.grad(piece)
        self.cut.collect_grads()
        self.parts.collect_grads()

    def take_model_values(self) -> None:
        """Bring the model's values to pieces with memory of their own; all others are the model's memory."""
        self.cut.take_model_values()
        self.parts.take_model_values()

    def start_param_sync(self) -> None:
        """Bring values back from memory of their own, and begin to gather every bucket that is stepped."""
        self.cut.start_values()
        self.parts.store_values()
        for bucket in self._buckets:
            self._start_gathering(bucket)

    def start_unit_sync(self, unit: int) -> None:
        """Begin to bring back a batch of what has memory of its own, or to gather a bucket that all have stepped.

        Args:
            unit: position in `units`.
        """
        if unit < self.cut.batches:
            self.cut.start_values(unit)
            if unit == self.cut.batches - 1:
                self.parts.store_values()
        else:
            self._start_gathering(self._buckets[unit - self.cut.batches])

    def _start_gathering(self, bucket: int) -> None:
        """Begin to gather a bucket, in which every part has come back."""
        self.cut.finish_values()
        self.memory.gathering.stepped(bucket, self.groups)

    def finish_param_sync(self) -> None:
        """Return when the gathered parameters may be read, or when the forward pass will wait for them."""
        self.cut.finish_values()
        self.memory.finish_param_sync()

    def travels(self) -> Mapping[str, Travel]:
        """Return what this rank sends for each matrix in a step."""
        exchanged = {**self.cut.bytes_sent(), **self.parts.bytes_sent()}
        return {
            name: Travel("whole", route.gathered + exchanged.get(name, 0), route.owner)
            for name, route in self.routes.items()
        }
