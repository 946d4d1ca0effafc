"""Pieces on the CPU: gradients come down, stepped values go up, whatever strategy they are from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.sharding import Exchange, OverlappedParams, Piece, Sent, ShardedParams, SharedStates, Travel
from megaopt_device.placement.copies import Copies

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.params import ParamInfo

__all__ = ["PlacedParams", "placed_params"]


@define(eq=False)
class PlacedParams(ShardedParams):
    """The pieces of a strategy, some of them with their values and gradients in CPU memory.

    Args:
        source: what the strategy attached.
        placed: positions of the pieces that are on the CPU.
        copies: moves them.
        pin_grads: pin the memory of gradients.
        pin_params: pin the memory of values.
    """

    source: ShardedParams
    placed: frozenset[int]
    copies: Copies
    pin_grads: bool = True
    pin_params: bool = True
    pieces: Sequence[Piece] = field(init=False)
    exchange: Exchange | None = field(init=False)
    _grads: dict[int, torch.Tensor] = field(factory=dict, init=False)
    _sent: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self.pieces = [
            self._piece(piece) if index in self.placed else piece
            for index, piece in enumerate(self.source.pieces)
        ]
        exchange = self.source.exchange
        self.exchange = (
            None if exchange is None else PlacedExchange(exchange, self.pieces, self.copies.device)
        )
        self._bring_values()

    def _piece(self, piece: Piece) -> Piece:
        memory = self.copies.memory_like(piece.param, pinned=self.pin_params)
        return Piece(piece.spec, torch.nn.Parameter(memory), piece.model_params)

    @property
    def stats_group(self) -> ProcessGroup | None:  # type: ignore[override]
        """The strategy's."""
        return self.source.stats_group

    @property
    def takes_values_together(self) -> bool:  # type: ignore[override]
        """As the strategy does."""
        return self.source.takes_values_together

    @property
    def brought_together(self) -> Sequence[torch.Tensor]:  # type: ignore[override]
        """As the strategy does."""
        return self.source.brought_together

    @property
    def shared_states(self) -> SharedStates | None:  # type: ignore[override]
        """As the strategy does."""
        return self.source.shared_states

    def collect_grads(self) -> None:
        """Collect gradients, and bring those of placed pieces down."""
        self.source.collect_grads()
        for index in sorted(self.placed):
            self.pieces[index].grad = self._grad(index)
        self.copies.wait_down()

    def _grad(self, index: int) -> torch.Tensor | None:
        grad = self.source.pieces[index].grad
        if grad is None:
            return None
        if grad.layout != torch.strided:
            return grad.detach().to("cpu", copy=True)
        memory = self._grads.get(index)
        if memory is None or (memory.dtype, memory.shape) != (grad.dtype, grad.shape):
            memory = self._grads[index] = self.copies.memory_like(grad, pinned=self.pin_grads)
        self.copies.down(memory, grad.detach())
        return memory

    def take_model_values(self) -> None:
        """Bring the model's values to the strategy's pieces, and from there down."""
        self.source.take_model_values()
        self._bring_values()

    @torch.no_grad()
    def _bring_values(self) -> None:
        for index in sorted(self.placed):
            self.copies.down(self.pieces[index].param, self.source.pieces[index].param)
        self.copies.wait_down()

    @torch.no_grad()
    def send_up(self, indices: Collection[int]) -> None:
        """Begin to bring stepped values of placed pieces to the device; once a step each.

        Args:
            indices: positions of pieces; those that are not placed are left out.
        """
        for index in sorted(self.placed & frozenset(indices) - self._sent):
            self.copies.up(self.source.pieces[index].param, self.pieces[index].param)
            self._sent.add(index)

    def start_param_sync(self) -> None:
        """Bring what is stepped to the device, and begin to bring it to other ranks."""
        self.send_up(self.placed)
        self._sent.clear()
        self.copies.wait_up()
        self.source.start_param_sync()

    def finish_param_sync(self) -> None:
        """Return when every model parameter is up to date on this rank."""
        self.source.finish_param_sync()

    def refuses_late(self, param: torch.nn.Parameter) -> str | None:
        """Return why a parameter that begins to train later cannot be taken in.

        Args:
            param: the parameter.
        """
        reason = self.source.refuses_late(param)
        return reason or "optimizer_cpu_offload=True decides the place of each parameter at the build"

    def travels(self) -> Mapping[str, Travel]:
        """Return the strategy's."""
        return self.source.travels()

    def sent(self) -> Sent | None:
        """Return what the strategy has sent."""
        return self.source.sent()


@define(eq=False)
class PlacedOverlappedParams(PlacedParams):
    """Placed pieces of a strategy that brings them to other ranks a unit at a time."""

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """The strategy's units."""
        source: Any = self.source
        units: Sequence[Sequence[int]] = source.units
        return units

    def start_unit_sync(self, unit: int) -> None:
        """Bring a unit's stepped pieces to the device, and begin to bring them to other ranks.

        Args:
            unit: its position.
        """
        self.send_up(self.units[unit])
        self._sent.difference_update(self.units[unit])
        self.copies.wait_up()
        source: Any = self.source
        source.start_unit_sync(unit)


@define(eq=False)
class PlacedExchange:
    """An exchange whose updates travel and are transformed on the device, wherever the pieces are stepped.

    Args:
        source: the strategy's exchange.
        pieces: the placed pieces.
        device: where updates travel.
    """

    source: Exchange
    pieces: Sequence[Piece]
    device: torch.device

    @property
    def buckets(self) -> Sequence[Sequence[int]]:
        """The strategy's buckets."""
        return self.source.buckets

    @property
    def owned(self) -> Sequence[ParamInfo]:
        """What this rank owns."""
        return self.source.owned

    def start_to_owners(self, bucket: int, updates: Sequence[torch.Tensor | None]) -> None:
        """Bring updates to the device, and send them.

        Args:
            bucket: its position.
            updates: one for each of its pieces; None where there is none.
        """
        raised = [None if update is None else update.to(self.device) for update in updates]
        self.source.start_to_owners(bucket, raised)

    def finish_to_owners(self, bucket: int) -> Sequence[tuple[ParamInfo, torch.Tensor]]:
        """Return what has arrived, on the device.

        Args:
            bucket: its position.
        """
        return self.source.finish_to_owners(bucket)

    def start_back(self, bucket: int, transformed: Sequence[torch.Tensor]) -> None:
        """Send transformed updates back.

        Args:
            bucket: its position.
            transformed: on the device.
        """
        self.source.start_back(bucket, transformed)

    def finish_back(self, bucket: int) -> Sequence[torch.Tensor | None]:
        """Return what has come back, each where its piece is.

        Args:
            bucket: its position.
        """
        back = self.source.finish_back(bucket)
        where = [self.pieces[index].param.device for index in self.buckets[bucket]]
        return [None if update is None else update.to(at) for update, at in zip(back, where, strict=True)]


def placed_params(
    source: ShardedParams, placed: frozenset[int], copies: Copies, *, pin_grads: bool, pin_params: bool
) -> PlacedParams:
    """Return a strategy's pieces, some of them on the CPU.

    Args:
        source: what the strategy attached.
        placed: positions of the pieces that go to the CPU.
        copies: moves them.
        pin_grads: pin the memory of gradients.
        pin_params: pin the memory of values.
    """
    overlapped = isinstance(source, OverlappedParams)
    kind = PlacedOverlappedParams if overlapped else PlacedParams
    return kind(source, placed, copies, pin_grads, pin_params)
