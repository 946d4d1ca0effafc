"""Updates to the owners of their matrices and back, bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from attrs import define, evolve, field, frozen

from megaopt_core.params import ParamInfo
from megaopt_core.sharding import Exchange, Piece
from megaopt_fsdp.mail import Mail, Message
from megaopt_fsdp.routes import Route, Travelling

__all__ = ["OwnerExchange"]


@define(eq=False)
class _Bucket:
    """What is on its way of one bucket.

    Args:
        shapes: for each piece, of the update that was given; the update itself need not stay.
        routes: what travels of it.
        like: a tensor of the dtype and on the device of what travels.
    """

    shapes: Sequence[torch.Size | None]
    routes: Sequence[Route]
    like: torch.Tensor


@frozen
class OwnerExchange(Exchange):
    """Updates go to owners and come back in one all-to-all a bucket and direction.

    Args:
        pieces: what this rank steps.
        infos: name to what each parameter is.
        travelling: the buckets: what this rank owns or holds a part of.
        device: where.
        mail: sends it.
    """

    pieces: Sequence[Piece]
    infos: Mapping[str, ParamInfo]
    travelling: Sequence[Travelling]
    device: torch.device
    mail: Mail
    buckets: Sequence[Sequence[int]] = field(init=False)
    owned: Sequence[ParamInfo] = field(init=False)
    _info_of: dict[str, ParamInfo] = field(factory=dict, init=False)
    _under_way: dict[int, _Bucket] = field(factory=dict, init=False)
    _messages: dict[int, Message] = field(factory=dict, init=False)

    @buckets.default
    def _positions(self) -> Sequence[Sequence[int]]:
        position = {piece.spec.members[0][1].name: index for index, piece in enumerate(self.pieces)}
        buckets = [[position.pop(route.name) for route in bucket.routes] for bucket in self.travelling]
        if position:  # of batches that are cut between their matrices a rank may have none
            buckets[0] += position.values()
        return buckets

    @owned.default
    def _owned(self) -> Sequence[ParamInfo]:
        rank = self.mail.rank
        return [
            evolve(self.infos[route.name], shape=route.box[1], offsets=self._offsets(route))
            for bucket in self.travelling
            for route in bucket.routes
            if route.owner == rank
        ]

    def _offsets(self, route: Route) -> tuple[int, ...]:
        """Return where a block begins in its parameter; nothing where it is all of it."""
        return () if route.box[1] == self.infos[route.name].shape else route.box[0]

    def __attrs_post_init__(self) -> None:
        self._info_of.update((info.name, info) for info in self.owned)

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Begin to send the parts of a bucket to their owners.

        Args:
            bucket: its position.
            updates: one a piece; None where a parameter has no gradient on any rank.
        """
        held = list(zip(self.travelling[bucket].routes, updates, strict=False))
        moving = [(route, update) for route, update in held if update is not None]
        routes = [route for route, _ in moving]
        like = torch.empty(0, dtype=self.travelling[bucket].there, device=self.device)
        self._messages[bucket] = self.mail.to_owners(routes, [update for _, update in moving], like)
        shapes = [None if update is None else update.shape for update in updates]
        self._under_way[bucket] = _Bucket(shapes, routes, like)

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Return the updates that this rank owns, whole.

        Args:
            bucket: its position.
        """
        under_way, rank = self._under_way[bucket], self.mail.rank
        wholes = self.mail.blocks(under_way.routes, self._messages.pop(bucket))
        mine = [route for route in under_way.routes if route.owner == rank]
        return [(self._info_of[route.name], whole) for route, whole in zip(mine, wholes, strict=True)]

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Begin to send what was transformed to all ranks that hold parts of it.

        Args:
            bucket: its position.
            transformed: what this rank owns.
        """
        under_way = self._under_way[bucket]
        self._messages[bucket] = self.mail.back(under_way.routes, transformed, under_way.like)

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return what has come back, in the shapes of the pieces.

        Args:
            bucket: its position.
        """
        under_way = self._under_way.pop(bucket)
        parts = self.mail.parts(under_way.routes, self._messages.pop(bucket))
        arrived = {route.name: part for route, part in zip(under_way.routes, parts, strict=True)}
        names = [self.pieces[index].spec.members[0][1].name for index in self.buckets[bucket]]
        nothing = under_way.like  # without an owner a piece has no elements
        return [
            shape if shape is None else arrived.get(name, nothing).view(shape)
            for name, shape in zip(names, under_way.shapes, strict=True)
        ]
