"""States and main parameters that are on the CPU between two phases of a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field
from torch.utils._pytree import tree_leaves, tree_map_only

from megaopt_core.execution import StatePlaceholder, is_placeholder

if TYPE_CHECKING:
    from megaopt_core.execution import InnerPart

__all__ = ["MovedStates", "OffloadedPart"]


type Move = Callable[[torch.Tensor], torch.Tensor]


@define(eq=False)
class MovedStates:
    """Moves the tensors of states, and remembers by parameter and key which device each came from.

    What was never moved away is never moved back: step counts that live on the CPU stay there.

    Example:
        >>> weight, moved = torch.zeros(2), MovedStates()
        >>> states = {weight: {"exp_avg": torch.ones(2), "step": 1}}
        >>> moved.away(states, [weight], torch.device("cpu"), torch.clone)
        >>> moved.back(states, [weight], lambda value, device: value.to(device))
        >>> states[weight]["exp_avg"].tolist()
        [1.0, 1.0]
    """

    _origins: dict[Any, dict[str, torch.device]] = field(factory=dict)

    def away(
        self, states: MutableMapping[Any, Any], keys: Iterable[Any], device: torch.device, move: Move
    ) -> None:
        """Move every state tensor that is on a device.

        Args:
            states: parameter, or name, to its state.
            keys: whose states; those that have none are left out.
            device: what is elsewhere stays there.
            move: returns the tensor that is kept instead.
        """
        for key in keys:
            state = states.get(key) or {}
            found = {
                name
                for name, value in state.items()
                if any(
                    isinstance(each, torch.Tensor) and each.device == device for each in tree_leaves(value)
                )
            }
            self._origins.setdefault(key, {}).update(dict.fromkeys(found, device))
            self._replace(states, key, found, lambda value: move(value) if value.device == device else value)

    def back(
        self,
        states: MutableMapping[Any, Any],
        keys: Iterable[Any],
        move: Callable[[torch.Tensor, torch.device], torch.Tensor],
    ) -> None:
        """Move every tensor back whose state had been moved.

        Args:
            states: parameter, or name, to its state.
            keys: whose states.
            move: returns the tensor on a device.
        """
        for key in keys:
            for name, device in self._origins.pop(key, {}).items():
                self._replace(states, key, {name}, lambda value, device=device: move(value, device))  # type: ignore[misc]

    def _replace(
        self, states: MutableMapping[Any, Any], key: Any, names: Collection[str], move: Move
    ) -> None:
        state = states.get(key) or {}
        moved = {name: tree_map_only(torch.Tensor, move, state[name]) for name in names if name in state}
        if not moved:
            return
        if is_placeholder(state):  # what stands in for a state goes where the state would
            states[key] = StatePlaceholder({**state, **moved})
        else:
            state.update(moved)


@define(eq=False)
class OffloadedPart:
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
