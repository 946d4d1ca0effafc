"""State that ranks show and load together in state dicts of torch's schema, in a form that their strategy has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from megaopt_core.errors import MegaoptError, StateDictError
from megaopt_core.parallel._groups import communicates
from megaopt_core.parallel._reduction import gather_objects
from megaopt_core.params._shards import Shard
from megaopt_core.state._pieces import states_of

if TYPE_CHECKING:
    from megaopt_core.sharding._protocol import SharedStates
    from megaopt_core.state._protocol import NamedPieces, NamedState

__all__ = ["brought_to_ranks", "refused_together", "shared_states"]


@frozen(eq=False)
class _Shared:
    """The parameters of one part, whose states have a form of their own.

    Args:
        part: steps them.
        states: the form.
        params: its parameters by name, those that other ranks step too.
    """

    part: NamedPieces
    states: SharedStates
    params: Mapping[str, torch.nn.Parameter]

    @property
    def keys(self) -> frozenset[str]:
        """State keys of whole tensors that a split step keeps."""
        return frozenset() if self.part.split is None else self.part.split.transform_keys

    def owned(self) -> dict[str, list[Shard]]:
        """Return the whole tensors of which this rank keeps states, by the name of their parameter."""
        found: dict[str, list[Shard]] = {}
        for piece in states_of(self.part):
            if all(map(piece.holds, self.keys)):
                for _, shard in piece.members:
                    found.setdefault(shard.name, []).append(shard)
        return found


def shared_states(optimizer: NamedState) -> Iterator[_Shared]:
    """Yield the parts whose strategy has a form for states that ranks share.

    Args:
        optimizer: a built optimizer.
    """
    for part in optimizer.parts:
        states = part.sharded.shared_states
        if states is not None:
            params = {optimizer.names[param]: param for group in part.groups for param in group["params"]}
            yield _Shared(part, states, params)


def brought_to_ranks(
    optimizer: NamedState, state_dict: Mapping[str, Any], names: Sequence[str]
) -> Mapping[str, Any]:
    """Return a state dict in which each rank has what it keeps: a collective where ranks keep states together.

    Args:
        optimizer: what will load it.
        state_dict: the state dict; not changed.
        names: of its parameters, in the order of its groups.

    Raises:
        StateDictError: ranks load different states.
    """
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    index_of = dict(zip(names, indices, strict=False))
    state = dict(state_dict["state"])
    for each in shared_states(optimizer):
        given = {name: state.get(index_of.get(name)) for name in each.params}
        told = {name: values for name, values in given.items() if isinstance(values, Mapping)}
        for name, values in each.states.take(told, each.owned(), each.keys).items():
            state[index_of[name]] = values
    return {**state_dict, "state": state}


def refused_together(optimizer: NamedState, failure: MegaoptError | None) -> None:
    """Raise on all ranks that keep states together if one of them cannot load: a collective where there are any.

    Args:
        optimizer: a built optimizer.
        failure: why this rank cannot load; None: it can.

    Raises:
        MegaoptError: this rank's own error, else a StateDictError with the words of another rank's.
    """
    groups = [each.states.group(each.keys) for each in shared_states(optimizer)]
    words = None if failure is None else str(failure)
    told = [gather_objects(words, group, "loading a state dict") for group in groups if communicates(group)]
    if failure is not None:
        raise failure
    for said in (each for of_group in told for each in of_group if each is not None):
        raise StateDictError(said)
