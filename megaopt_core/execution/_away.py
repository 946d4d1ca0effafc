"""States and main parameters that are on the CPU between two phases of a run."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from attrs import define, field

from megaopt_core.execution._exchanged_step import ExchangedStep
from megaopt_core.execution._moved_states import MovedStates
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.sharding._live_model import Piece

__all__ = ["AwayParts", "InnerPart"]


class InnerPart(Protocol):
    """What a runner steps: an inner optimizer and its precision policy, over this rank's pieces."""

    inner: torch.optim.Optimizer
    precision: PrecisionPolicy
    stepped: Sequence[torch.Tensor]
    split: ExchangedStep | None

    @property
    def config(self) -> Any:
        """The run's configuration."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """This rank's pieces; `stepped` has the tensor that is stepped for each."""


@define(eq=False)
class AwayParts:
    """What one inner optimizer keeps, moved to the CPU; the model's own memory stays where it is."""

    _states: MovedStates = field(factory=MovedStates)
    _mains: list[tuple[torch.Tensor, torch.device]] = field(factory=list)

    def leave(self, part: InnerPart) -> None:
        """Move states and main values to the CPU.

        Args:
            part: whose.
        """
        for mapping, key, device in _kept(part):
            self._states.away(mapping, [key], device, _to_cpu)
        owned = {piece.param.untyped_storage().data_ptr() for piece in part.pieces}
        for tensor in chain.from_iterable(part.precision.watched()):
            if tensor.untyped_storage().data_ptr() not in owned:
                self._mains.append((tensor, tensor.device))
                tensor.data = _to_cpu(tensor.data)

    def come_back(self, part: InnerPart) -> None:
        """Move all of it back to where it was.

        Args:
            part: whose.
        """
        for mapping, key, _ in _kept(part):
            self._states.back(mapping, [key], lambda value, device: value.to(device))
        for tensor, device in self._mains:
            tensor.data = tensor.data.to(device)


def _kept(part: InnerPart) -> list[tuple[MutableMapping[Any, Any], Any, torch.device]]:
    """Return every mapping of states with a key in it, and the device whose tensors are to leave."""
    found: list[tuple[MutableMapping[Any, Any], Any, torch.device]] = [
        (part.inner.state, tensor, tensor.device) for tensor in part.stepped
    ]
    if part.split is not None and part.pieces:
        device, owned = part.pieces[0].model_params[0].device, part.split.transform_state
        found += [(owned, name, device) for name in owned]
    return found


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    # A copy also where it is on the CPU already: the same code runs there.
    return tensor.to("cpu", copy=True)
