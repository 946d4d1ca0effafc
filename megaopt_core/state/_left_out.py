"""States that a state dict lacks: those of frozen parameters, which torch's functions leave out, and any other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.params._names import shown
from megaopt_core.params._parts import local_tensor
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.state._origin import ROUTED, STEPPED

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = ["FROM_ALL_RANKS", "require_state", "with_left_out"]

FROM_ALL_RANKS = "load a checkpoint of save_checkpoint() or torch.distributed.checkpoint on all ranks"
"""What to do where one rank's state dict is not enough."""


def with_left_out(
    optimizer: StatefulOptimizer, state_dict: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Any]:
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


def require_state(optimizer: StatefulOptimizer, without: Collection[str], lacking: Collection[str]) -> None:
    """Raise where a state dict lacks the state of a parameter: it has been stepped here, or was where it is from.

    Args:
        optimizer: what will load it.
        without: the parameters that have no state there, and were not saved before their first step.
        lacking: those whose state is said to be elsewhere, or has been taken out.

    Raises:
        StateDictError: it does.
    """
    stepped = any(part.changes.has_step for part in optimizer.parts)
    for param, name in optimizer.names.items():
        if name not in without or not (stepped or name in lacking) or not param.numel():
            continue
        kept = {key for key, value in optimizer.state[param].items() if isinstance(value, torch.Tensor)}
        if kept - {MAIN_PARAM}:
            words = (
                f"the state dict lacks the state of {name!r}, as that of one rank lacks what other ranks keep: "
                f"{FROM_ALL_RANKS}"
                if name in lacking
                else f"the state dict has no state of {name!r}, which has been stepped here"
            )
            raise StateDictError(
                f"{words}; strict=False keeps the state that this optimizer has", names=[name]
            )


def _had_state(
    optimizer: StatefulOptimizer, groups: Sequence[Mapping[str, Any]], frozen: Mapping[str, Any]
) -> set[str]:
    """Return the parameters that had a state; a flattened state dict only tells of those in groups like ours."""
    told = next((group[ROUTED][STEPPED] for group in groups if STEPPED in group.get(ROUTED, {})), None)
    if told is not None:
        return set(told.splitlines())
    stateless = {name for name, param in frozen.items() if not optimizer.state[param]}
    return {name for group in groups for name in group.get("param_names", ())} - stateless


def _is_live(
    optimizer: StatefulOptimizer, param: torch.nn.Parameter, state: Mapping[str, Any] | None
) -> bool:
    """Return whether a state's tensors are the very ones that the optimizer has."""
    for key, value in (state or {}).items():
        present = optimizer.state[param].get(key)
        if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor) and value.numel() > 1:
            return local_tensor(value).data_ptr() == local_tensor(present).data_ptr()
    return False
