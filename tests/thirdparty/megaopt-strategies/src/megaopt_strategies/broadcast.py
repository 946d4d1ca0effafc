"""Live pieces whose owners send them to all other ranks: what every strategy of this package attaches."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core import ProcessGroupCollection
from megaopt_core.params import Shard
from megaopt_core.sharding import (
    LiveModel,
    ParamLayout,
    Piece,
    PieceSpec,
    ShardedParams,
    Travel,
    finish_grad_sync,
)


@define(eq=False)
class BroadcastParams(ShardedParams):
    """Pieces of one shard each; gradients are whole on every rank.

    Args:
        model: the live model.
        pieces: this rank's.
        stats_group: norms add up over it.
        group: the ranks that share the optimizer out; None: this one alone.
        senders: `(rank in the group, piece)` of every piece of every rank, once.
    """

    model: LiveModel
    pieces: list[Piece]
    stats_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None
    senders: list[tuple[int, PieceSpec]]
    _under_way: list[tuple[dist.Work, Shard, torch.Tensor]] = field(factory=list, init=False)

    def collect_grads(self) -> None:
        """Take the gradients of the elements that are stepped here."""
        finish_grad_sync(self.model.chunks)
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            grad = self.model.grad(shard)
            piece.grad = None if grad is None else grad.view(piece.param.shape)

    def take_model_values(self) -> None:
        """Fill memory that is a piece's own."""
        for piece in self.pieces:
            self.model.fill(piece)

    def start_param_sync(self) -> None:
        """Put the stepped values into the model, and begin to send them."""
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            self.model.store(shard, piece.param.detach())
        if self.group is None:
            return
        for sender, spec in self.senders:
            ((_, shard),) = spec.members
            values = self.model.values(shard).contiguous()
            work = dist.broadcast(values, group=self.group, group_src=sender, async_op=True)
            self._under_way.append((work, shard, values))

    def finish_param_sync(self) -> None:
        """Wait, and put what has arrived into the model."""
        for work, shard, values in self._under_way:
            work.wait()
            self.model.store(shard, values)
        self._under_way.clear()

    def travels(self) -> dict[str, Travel]:
        """Tell of whole tensors that an owner steps alone, and sends to the others."""
        others = 0 if self.group is None else self.group.size() - 1
        mine = 0 if self.group is None else self.group.rank()
        return {
            shard.name: Travel("whole", others * self.model.values(shard).nbytes * (sender == mine))
            for sender, spec in self.senders
            for _, shard in spec.members
            if shard.is_whole and spec.peers is None
        }


def attach(
    layout: ParamLayout,
    model: LiveModel,
    pgs: ProcessGroupCollection,
    groups: Sequence[int],
    is_expert: bool,
    make_piece: Callable[[PieceSpec], Piece],
) -> BroadcastParams:
    """Return the pieces of some groups; `make_piece(spec)` brings each to life."""
    axis, group = "expert_dp" if is_expert else "dp", pgs.shard_group(is_expert=is_expert)
    senders = [
        (place, spec)
        for place in range(1 if group is None else group.size())
        for spec in layout.pieces({**model.rank, axis: place})
        # Of replicas the first sends.
        if spec.group in groups and (spec.peers is None or spec.peers.is_counted)
    ]
    pieces = [make_piece(spec) for spec in layout.pieces(model.rank) if spec.group in groups]
    stats_group = pgs.sharded_stats_group(is_expert=is_expert)
    return BroadcastParams(model, pieces, stats_group, group, senders)
