"""What a rank steps of a model that is cut: its parts, where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from megaopt_core.params import local_tensor
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, Sent, ShardedParams, SharedStates, Travel
from megaopt_fsdp.exchange import OwnerExchange
from megaopt_fsdp.states.shared import DTensorStates

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LocalParams", "local_piece"]


def local_piece(spec: PieceSpec, model: LiveModel) -> Piece:
    """Return a piece that is what this rank holds of a parameter, in the model's memory.

    Args:
        spec: the piece as pure data.
        model: the live model.
    """
    param = model.params[spec.members[0][1].name]
    return Piece(spec, torch.nn.Parameter(local_tensor(param)), (param,))


@define(eq=False)
class LocalParams(ShardedParams):
    """The local tensors of DTensors: FSDP2 reduces their gradients, and gathers them when it needs them.

    Args:
        model: the live model.
        pieces: one a parameter.
        stats_group: norms and counts add up over it.
        exchange: how updates travel that must be seen whole; None: none do.
        told: how the update of each travels, for reports.
    """

    model: LiveModel
    pieces: Sequence[Piece]
    stats_group: ProcessGroup | None
    exchange: OwnerExchange | None = None
    told: Mapping[str, Travel] = {}
    shared_states: SharedStates = field(init=False)

    @shared_states.default
    def _states(self) -> SharedStates:
        owners = None if self.exchange is None else self.exchange.mail.group
        return DTensorStates(owners, of_all_params=True)

    def collect_grads(self) -> None:
        """Take the local part of every gradient."""
        if self.exchange is not None:
            self.exchange.mail.begin()
        for piece in self.pieces:
            ((_, shard),) = piece.spec.members
            grad = self.model.grad(shard)
            piece.grad = None if grad is None else grad.view(piece.spec.shape)

    def take_model_values(self) -> None:
        """Point the pieces to where the parameters lie now: a load may have moved them."""
        for piece in self.pieces:
            local = local_tensor(piece.model_params[0])
            if piece.param.data_ptr() != local.data_ptr():
                piece.param.data = local

    def start_param_sync(self) -> None:
        """Nothing to bring: the forward pass gathers."""

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""

    def sent(self) -> Sent | None:
        """Return what this rank has sent since the last step began; None where nothing travels."""
        return None if self.exchange is None else self.exchange.mail.sent

    def travels(self) -> Mapping[str, Travel]:
        """Return how the update of each parameter travels to its owner."""
        return self.told
