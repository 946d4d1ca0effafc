"""Optimizer states that leave their device for a time, and come back to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, MutableMapping
from typing import Any

import torch
from attrs import define, field
from torch.utils._pytree import tree_leaves, tree_map_only

from megaopt_core.execution._placeholders import StatePlaceholder, is_placeholder

__all__ = ["MovedStates"]

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
