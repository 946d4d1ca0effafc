"""State dicts in torch's schema over ranks: what is cut says so, and what ranks keep together they show and load so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from attrs import frozen

from megaopt_checkpoint.values.sliced import SlicedTensor
from megaopt_core.errors import MegaoptError, StateDictError, UnsupportedOperationError
from megaopt_core.parallel import communicates, gather_objects
from megaopt_core.params import Shard, is_dtensor
from megaopt_core.state import PieceState, states_of

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer, OptimizerPart
    from megaopt_core.sharding import SharedStates

__all__ = [
    "StateOfOtherRanks",
    "brought_to_ranks",
    "names_of_slices",
    "refused_together",
    "with_states_of_all",
]


class StateOfOtherRanks(dict[str, Any]):
    """A state of which this rank has nothing: without what other ranks keep, a file would be taken for the whole.

    It cannot be pickled. Copies in memory are the same object, so that a copy of a state dict loads where it was made.
    """

    def __copy__(self) -> StateOfOtherRanks:
        """Return itself."""
        return self

    def __deepcopy__(self, memo: Any) -> StateOfOtherRanks:
        """Return itself.

        Args:
            memo: what has been copied already.
        """
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse."""
        raise UnsupportedOperationError(
            "a state dict of one rank cannot be pickled: other ranks keep the state of some of its parameters. Use "
            "save_checkpoint() and load_checkpoint(), or torch.distributed.checkpoint, also with torch's "
            "get_optimizer_state_dict(): each shard is saved once, and loads on any number of ranks"
        )


@frozen(eq=False)
class _Shared:
    """The parameters of one part, whose states have a form of their own.

    Args:
        part: steps them.
        states: the form.
        params: its parameters by name, those that other ranks step too.
    """

    part: OptimizerPart
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


def shared_states(optimizer: MegatronOptimizer) -> Iterator[_Shared]:
    """Yield the parts whose strategy has a form for states that ranks share.

    Args:
        optimizer: a built optimizer.
    """
    for part in optimizer.parts:
        states = part.sharded.shared_states
        if states is not None:
            params = {optimizer.names[param]: param for group in part.groups for param in group["params"]}
            yield _Shared(part, states, params)


def names_of_slices(optimizer: MegatronOptimizer) -> set[str]:
    """Return the parameters whose states are asked for as slices, also where this rank has all of them.

    Args:
        optimizer: a built optimizer.
    """
    return set().union(*(each.params for each in shared_states(optimizer) if each.states.of_all_params))


def with_states_of_all(
    optimizer: MegatronOptimizer, states: dict[str, dict[str, Any]], cut: Collection[str]
) -> dict[str, dict[str, Any]]:
    """Return states in which those of cut parameters tell of what other ranks have.

    A strategy may have another form for states that ranks share, such as DTensors; all of them must call it then.
    `torch.distributed.checkpoint` saves every slice once and reads what a rank needs on any number of ranks; nothing
    else can be done with them, so that no part can be taken for the whole. The same holds where other ranks keep all of
    a parameter's state.

    Args:
        optimizer: a built optimizer.
        states: what this rank exports of each parameter, state of cut parameters as slices; changed in place.
        cut: names of the parameters of which this rank does not step everything.
    """
    for each in shared_states(optimizer):
        each.states.show(each.params, {name: states[name] for name in each.params}, each.keys)
    elsewhere = {name: state for name, state in _of_other_ranks(optimizer, cut) if not states[name]}
    if not elsewhere and not any(states.values()):
        return {}  # as in torch
    return {**states, **elsewhere}


def _of_other_ranks(
    optimizer: MegatronOptimizer, cut: Collection[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
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
                state[key] = SlicedTensor(param.shape, dtype, device, ())
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


def _is_undivided(optimizer: MegatronOptimizer, param: torch.nn.Parameter) -> bool:
    """Return whether this rank's model has all of a parameter."""
    entry = None if optimizer.routing is None else optimizer.routing.params.get(optimizer.names[param])
    return entry is not None and tuple(entry.spec.shape) == tuple(param.shape)


def brought_to_ranks(
    optimizer: MegatronOptimizer, state_dict: Mapping[str, Any], names: Sequence[str]
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


def refused_together(optimizer: MegatronOptimizer, failure: MegaoptError | None) -> None:
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
