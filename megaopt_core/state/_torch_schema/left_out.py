"""States of frozen parameters, which torch's functions leave out of a state dict that they load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.params._names import shown
from megaopt_core.params._parts import local_tensor
from megaopt_core.state._document import ROUTED, STEPPED

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = ["with_left_out"]


type _StateDict = Mapping[str, Any]


def with_left_out(optimizer: NamedState, state_dict: _StateDict, names: Sequence[str]) -> _StateDict:
    """Return a state dict with those states of frozen parameters that torch has read into their places already.

    Args:
        optimizer: what will load it.
        state_dict: the state dict; not changed.
        names: of its parameters, in the order of its groups.

    Raises:
        StateDictError: a parameter that had a state is frozen here, and the state was left out.
    """
    groups, states = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in groups for index in group["params"]]
    if not any(isinstance(index, str) for index in indices):
        return state_dict
    at = dict(zip(names, indices, strict=False))
    frozen = {name: param for param, name in optimizer.names.items() if not param.requires_grad}
    had = _had_state(optimizer, groups, frozen) if any(map(states.get, at.values())) else set[str]()
    others = {} if optimizer.late is None else optimizer.late.keepable()
    read_in_place = any(
        _is_live(optimizer, param, states.get(at.get(name)))
        for param, name in optimizer.names.items()
        if param.requires_grad
    )
    lost, here = list[str](), dict[Any, Any]()
    for name in sorted(had & (frozen.keys() | others.keys())):
        state = states.get(at.get(name))
        if name in frozen and read_in_place:
            here[at[name]] = state or {**optimizer.state[frozen[name]]}
        elif not state or (name in frozen and _is_live(optimizer, frozen[name], state)):
            lost.append(name)
    if lost:
        raise StateDictError(
            f"the state dict lacks the state of {shown(lost)}, frozen here: torch's set_optimizer_state_dict() leaves "
            "it out. Build and load while it is trainable and freeze it after the load, or use load_state_dict() or "
            "load_checkpoint(), which keep its state",
            names=lost,
        )
    return {**state_dict, "state": {**states, **here}}


def _had_state(optimizer: NamedState, groups: Sequence[_StateDict], frozen: Mapping[str, Any]) -> set[str]:
    """Return the parameters that had a state; a flattened state dict only tells of those in groups like ours."""
    told = next((group[ROUTED][STEPPED] for group in groups if STEPPED in group.get(ROUTED, {})), None)
    if told is not None:
        return set(told.splitlines())
    stateless = {name for name, param in frozen.items() if not optimizer.state[param]}
    return {name for group in groups for name in group.get("param_names", ())} - stateless


def _is_live(optimizer: NamedState, param: torch.nn.Parameter, state: Mapping[str, Any] | None) -> bool:
    """Return whether a state's tensors are the very ones that the optimizer has."""
    for key, value in (state or {}).items():
        present = optimizer.state[param].get(key)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and value.numel() > 1:
            return local_tensor(value).data_ptr() == local_tensor(present).data_ptr()
    return False
