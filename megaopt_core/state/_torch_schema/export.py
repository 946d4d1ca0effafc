"""State dicts in torch's schema, in which what is cut over ranks says so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megaopt_core.params._parts import is_dtensor
from megaopt_core.state._pieces import PieceState, states_of
from megaopt_core.state._torch_schema.shared import shared_states
from megaopt_core.state._values.elsewhere import StateOfOtherRanks
from megaopt_core.state._values.sliced import SlicedTensor

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = ["names_of_slices", "with_states_of_all"]


def names_of_slices(optimizer: NamedState) -> set[str]:
    """Return the parameters whose states are asked for as slices, also where this rank has all of them.

    Args:
        optimizer: a built optimizer.
    """
    return set().union(*(each.params for each in shared_states(optimizer) if each.states.of_all_params))


def with_states_of_all(
    optimizer: NamedState, state_dict: dict[str, Any], cut: Collection[str]
) -> dict[str, Any]:
    """Return a state dict in which state of cut parameters tells of what other ranks have.

    A strategy may have another form for states that ranks share, such as DTensors; all of them must call it then.
    `torch.distributed.checkpoint` saves every slice once and reads what a rank needs on any number of ranks; nothing
    else can be done with them, so that no part can be taken for the whole. The same holds where other ranks keep all of
    a parameter's state.

    Args:
        optimizer: a built optimizer.
        state_dict: what it exports, state of cut parameters as slices; changed in place.
        cut: names of the parameters of which this rank does not step everything.
    """
    exported = {
        name: state_dict["state"][index]
        for group in state_dict["param_groups"]
        for index, name in zip(group["params"], group["param_names"], strict=True)
    }
    for each in shared_states(optimizer):
        each.states.show(each.params, {name: exported[name] for name in each.params}, each.keys)
    elsewhere = {name: state for name, state in _of_other_ranks(optimizer, cut) if not exported[name]}
    if not elsewhere and not any(exported.values()):
        state_dict["state"] = {}  # as in torch
    for group in state_dict["param_groups"]:
        for index, name in zip(group["params"], group["param_names"], strict=True):
            if name in elsewhere:
                state_dict["state"][index] = elsewhere[name]
    return state_dict


def _of_other_ranks(optimizer: NamedState, cut: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield cut parameters whose optimizer keeps states, as far as this rank knows, with what stands for their state.

    It has a tensor without boxes where all of the optimizer's pieces here keep one of the same key: torch's functions
    that make one state dict of those of all ranks then meet something that they cannot take for a value.
    """
    for part in optimizer.parts:
        pieces = list(states_of(part))
        if pieces and not any(piece.inner or piece.extra for piece in pieces):
            continue
        like = _common_state(pieces)
        for param in (param for group in part.groups for param in group["params"]):
            name, state = optimizer.names[param], StateOfOtherRanks()
            if name not in cut or is_dtensor(param):
                continue
            if like is not None and _is_undivided(optimizer, param):
                key, dtype, device = like
                state[key] = SlicedTensor(param.shape, dtype, device, (), _no_box)
            yield name, state


def _common_state(pieces: Sequence[PieceState]) -> tuple[str, torch.dtype, torch.device] | None:
    """Return a state that every piece keeps for each of its elements, with dtype and device of what is exported."""
    kept = [
        {
            key: (key, torch.float32 if piece.is_coded(key) else value.dtype, value.device)
            for key, value in (*piece.inner.items(), *piece.extra.items())
            if piece.is_elementwise(key, value) and not piece.part.precision.is_code(key)
        }
        for piece in pieces
    ]
    first = kept[0] if kept else {}
    return next((like for key, like in first.items() if all(key in other for other in kept)), None)


def _is_undivided(optimizer: NamedState, param: torch.nn.Parameter) -> bool:
    """Return whether this rank's model has all of a parameter."""
    entry = None if optimizer.routing is None else optimizer.routing.params.get(optimizer.names[param])
    return entry is not None and tuple(entry.spec.shape) == tuple(param.shape)


def _no_box(index: int) -> NoReturn:
    raise LookupError(index)
