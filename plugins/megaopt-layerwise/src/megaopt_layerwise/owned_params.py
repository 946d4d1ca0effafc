"""Parameters of an optimizer that was wrapped by hand, dealt to the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import define, field

from megaopt_core.parallel import communicates, needs_all_ranks, rank_in, size_of
from megaopt_core.sharding import Piece, ShardedParams, finish_grad_sync, gradient_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OwnedParams"]


@define(eq=False)
class OwnedParams(ShardedParams):
    """Parameters with one owner each; every rank has whole gradients, and sends its values as one segment a dtype.

    Args:
        pieces: those that this rank owns.
        owned: for each rank, the parameters that it owns, in one order on all ranks.
        group: the ranks; None: this one alone.
        stats_group: norms and counts add up over it.
        chunks: the model; gradients of wrapped chunks are reduced before they are taken.
    """

    pieces: Sequence[Piece]
    owned: Sequence[Sequence[torch.nn.Parameter]]
    group: ProcessGroup | None
    stats_group: ProcessGroup | None
    chunks: Sequence[torch.nn.Module] = ()
    _under_way: list[tuple[list[torch.nn.Parameter], torch.Tensor]] = field(factory=list, init=False)
    _works: list[dist.Work] = field(factory=list, init=False)

    def collect_grads(self) -> None:
        """Take the gradients of the owned parameters."""
        owned = () if self.chunks else (param for params in self.owned for param in params)
        finish_grad_sync(self.chunks, owned)
        for piece in self.pieces:
            (param,) = piece.model_params
            piece.grad = gradient_of(param)

    def take_model_values(self) -> None:
        """Nothing to bring: the pieces are the model's memory."""

    def start_param_sync(self) -> None:
        """Begin to send this rank's values to all others, and to receive theirs."""
        if not communicates(self.group):
            return
        self.finish_param_sync()
        mine = rank_in(self.group)
        dtypes = dict.fromkeys(param.dtype for params in self.owned for param in params)
        messages = []
        for dtype in dtypes:
            of_rank = [[param for param in params if param.dtype == dtype] for params in self.owned]
            for rank, params in enumerate(of_rank):
                if params:
                    messages.append((rank, params, self._segment(params, filled=rank == mine)))
        works = []
        for rank, params, segment in messages:
            if rank == mine:
                works += [
                    dist.P2POp(dist.isend, segment, group=self.group, group_peer=peer)
                    for peer in range(size_of(self.group))
                    if peer != mine
                ]
            else:
                works.append(dist.P2POp(dist.irecv, segment, group=self.group, group_peer=rank))
                self._under_way.append((params, segment))
        # What is sent has to live until it is: the works hold it.
        self._works = list(dist.batch_isend_irecv(works)) if works else []

    @staticmethod
    def _segment(params: Sequence[torch.nn.Parameter], *, filled: bool) -> torch.Tensor:
        if filled:
            return torch.cat([param.detach().reshape(-1) for param in params])
        return params[0].new_empty(sum(param.numel() for param in params))

    def finish_param_sync(self) -> None:
        """Write what has arrived into the model.

        Raises:
            CommunicationError: another rank has stopped, or the process group's timeout is over.
        """
        works, self._works = self._works, []
        arrived, self._under_way = self._under_way, []
        with needs_all_ranks(f"exchange of parameters over {size_of(self.group)} ranks"):
            for work in works:
                work.wait()
        with torch.no_grad():
            for params, segment in arrived:
                for param, values in zip(
                    params, segment.split([param.numel() for param in params]), strict=True
                ):
                    param.copy_(values.view(param.shape))
