"""What a rank steps alone of a model that is cut: gradients come to it, and values go back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from attrs import define, field

from megaopt_core.params import local_tensor
from megaopt_core.sharding import LiveModel, Piece, PieceSpec, Sent, ShardedParams, SharedStates, Travel
from megaopt_fsdp.mail import Mail, Message
from megaopt_fsdp.routes import Route, Travelling
from megaopt_fsdp.states.shared import DTensorStates

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["OwnedParams"]


@define(eq=False)
class OwnedParams(ShardedParams):
    """Blocks that this rank steps whole, in memory of their own; FSDP2 keeps the parameters cut.

    Args:
        model: the live model.
        specs: the blocks that this rank owns.
        stats_group: norms and counts add up over it.
        buckets: what travels, on every rank as many.
        mail: sends it.
        told: how each parameter travels, for reports.
        device: where the parameters lie.
    """

    takes_values_together = True
    model: LiveModel
    specs: Sequence[PieceSpec]
    stats_group: ProcessGroup | None
    buckets: Sequence[Travelling]
    mail: Mail
    told: Mapping[str, Travel]
    device: torch.device
    pieces: Sequence[Piece] = field(init=False)
    shared_states: SharedStates = field(init=False)
    _piece_of: dict[str, Piece] = field(factory=dict, init=False)
    _returning: list[tuple[Travelling, Message]] = field(factory=list, init=False)

    @shared_states.default
    def _states(self) -> SharedStates:
        return DTensorStates(self.mail.group, of_all_params=False)

    def __attrs_post_init__(self) -> None:
        values = {route.name: value for route, value in self._arrivals(self._values, "back")}
        self.pieces = []
        for spec in self.specs:
            name = spec.members[0][1].name
            param = torch.nn.Parameter(values[name].clone().view(spec.shape))
            self.pieces.append(Piece(spec, param, (self.model.params[name],)))
        self._piece_of.update((piece.spec.members[0][1].name, piece) for piece in self.pieces)

    @property
    def brought_together(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        """This rank's parts of the parameters whose blocks travel."""
        return [
            local_tensor(self.model.params[route.name]) for bucket in self.buckets for route in bucket.routes
        ]

    def collect_grads(self) -> None:
        """Bring the parts of every gradient to the owner of its block."""
        self.mail.begin()
        for piece in self.pieces:
            piece.grad = None
        for route, grad in self._arrivals(self._grad, "there"):
            piece = self._piece_of[route.name]
            piece.grad = grad.view(piece.spec.shape)

    def take_model_values(self) -> None:
        """Bring the model's present values to the owners: a collective."""
        with torch.no_grad():
            for route, value in self._arrivals(self._values, "back"):
                piece = self._piece_of[route.name]
                piece.param.copy_(value.view(piece.spec.shape))

    def start_param_sync(self) -> None:
        """Send the values of owned blocks back to all parts, two buckets at a time."""
        self.finish_param_sync()
        for bucket in self.buckets:
            mine = [self._piece_of[route.name] for route in bucket.routes if route.owner == self.mail.rank]
            for piece in mine:
                piece.grad = None  # it has been used: its memory is free for the bucket
            like = torch.empty(0, dtype=bucket.back, device=self.device)
            message = self.mail.back(bucket.routes, [piece.param.detach() for piece in mine], like)
            self._returning.append((bucket, message))
            if len(self._returning) > 1:
                self._store(*self._returning.pop(0))

    def finish_param_sync(self) -> None:
        """Write into the model what is still on its way."""
        while self._returning:
            self._store(*self._returning.pop(0))

    def travels(self) -> Mapping[str, Travel]:
        """Return how each parameter travels to its owner and back."""
        return self.told

    def sent(self) -> Sent:
        """Return what this rank has sent since the last step began."""
        return self.mail.sent

    def _store(self, bucket: Travelling, message: Message) -> None:
        with torch.no_grad():
            for route, values in zip(bucket.routes, self.mail.parts(bucket.routes, message), strict=True):
                local = local_tensor(self.model.params[route.name])
                local.copy_(values.view(local.shape))

    def _values(self, name: str) -> torch.Tensor | None:
        return local_tensor(self.model.params[name]).detach()

    def _grad(self, name: str) -> torch.Tensor | None:
        return self.model.local_grad(name)

    def _arrivals(
        self, get: Callable[[str], torch.Tensor | None], way: str
    ) -> Iterator[tuple[Route, torch.Tensor]]:
        """Yield the blocks that this rank owns as their parts arrive; those of which nothing is there are left out.

        While one bucket is put together the next one travels.
        """
        under_way: tuple[Sequence[Route], Message] | None = None
        for bucket in self.buckets:
            found = [(route, get(route.name)) for route in bucket.routes]
            moving = [(route, part) for route, part in found if part is not None]
            like = torch.empty(0, dtype=getattr(bucket, way), device=self.device)
            routes = [route for route, _ in moving]
            message = self.mail.to_owners(routes, [part for _, part in moving], like)
            if under_way is not None:
                yield from self._blocks(*under_way)
            under_way = routes, message
        if under_way is not None:
            yield from self._blocks(*under_way)

    def _blocks(self, routes: Sequence[Route], message: Message) -> Iterator[tuple[Route, torch.Tensor]]:
        mine = [route for route in routes if route.owner == self.mail.rank]
        yield from zip(mine, self.mail.blocks(routes, message), strict=True)
