"""This rank's live slices of one inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from megaopt_core.sharding.base import Piece
from megaopt_core.sharding.layout import PieceSpec
from megaopt_distributed.memory import Memory

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistributedParams"]


@define(eq=False)
class DistributedParams:
    """Pieces that are slices of flat memory, which all optimizers of the model share.

    Args:
        memory: the flat memory.
        specs: this rank's pieces.
        groups: the groups that are stepped here, on any rank.
        stats_group: norms and counts add up over it.
    """

    memory: Memory
    specs: Sequence[PieceSpec]
    groups: tuple[int, ...]
    stats_group: ProcessGroup | None
    pieces: Sequence[Piece] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pieces = [self.memory.piece(spec) for spec in self.specs]

    def collect_grads(self) -> None:
        """Wait for reductions and set every piece's gradient."""
        self.memory.finish_grad_sync()
        for piece in self.pieces:
            piece.grad = self.memory.grad(piece)

    def start_param_sync(self) -> None:
        """Begin to gather the buckets of which every optimizer has stepped its part."""
        self.memory.stepped(self.groups)

    def finish_param_sync(self) -> None:
        """Return when the gathered parameters may be read, or when the forward pass will wait for them."""
        self.memory.finish_param_sync()
