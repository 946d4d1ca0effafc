"""Optimizer state under the parameters that users know: the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from megaopt_core.optimizers._param_state import ParamState, Slice
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.state._pieces import OwnedState, PieceState, states_of

__all__ = ["LiveState"]

_REQUIRED: Any = object()


class LiveState(MutableMapping[torch.nn.Parameter, MutableMapping[str, Any]]):
    """State keyed by model parameter; parameters of which another rank steps everything have an empty one.

    What is removed begins anew in the next step, as it does in torch; every rank of a strategy that shares state out
    does so, or none.

    Args:
        parts: the optimizer's parts.
        names: model parameter to canonical name.
    """

    def __init__(self, parts: Sequence[OptimizerPart], names: Mapping[torch.nn.Parameter, str]) -> None:
        self._names = names
        found: dict[torch.nn.Parameter, list[Slice]] = {}
        for part in parts:
            owned = {each.info.name: each for each in states_of(part) if isinstance(each, OwnedState)}
            for index, piece in enumerate(part.pieces):
                members = piece.spec.members
                is_param = len(members) == 1 and piece.param.shape == piece.model_params[0].shape
                for param, (offset, shard) in zip(piece.model_params, members, strict=True):
                    state = PieceState(part, index)
                    each = Slice(state, offset, shard, is_param, owned.get(shard.name))
                    found.setdefault(param, []).append(each)
        self._where = {param: ParamState(slices) for param, slices in found.items()}

    def cut_names(self) -> tuple[str, ...]:
        """Return the parameters of which this rank steps a part only, or nothing while another rank does."""
        stepped = {param: state.numel for param, state in self._where.items()}
        return tuple(name for param, name in self._names.items() if stepped.get(param, 0) < param.numel())

    @property
    def is_by_param(self) -> bool:
        """True where each parameter that is stepped here is a piece of its own."""
        return all(len(state.slices) == 1 and state.slices[0].is_param for state in self._where.values())

    def __getitem__(self, param: torch.nn.Parameter) -> MutableMapping[str, Any]:
        found = self._where.get(param)
        if found is not None:
            return found
        if param in self._names:
            return {}
        raise KeyError(param)

    def __setitem__(self, param: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        present = self[param]
        present.update(state)
        if not state:
            present.clear()

    def __delitem__(self, param: torch.nn.Parameter) -> None:
        self[param].clear()

    def pop(self, param: torch.nn.Parameter, default: Any = _REQUIRED) -> Any:
        """Remove a parameter's state and return what it was; the next step makes it anew.

        Args:
            param: the model's parameter.
            default: returned for a parameter that is not stepped here.

        Raises:
            KeyError: it is not stepped, and there is no default.
        """
        if param not in self and default is not _REQUIRED:
            return default
        state = dict(self[param])
        del self[param]
        return state

    def clear(self) -> None:
        """Remove the state of every parameter; the next step makes it anew."""
        for state in self._where.values():
            state.start_anew()

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __bool__(self) -> bool:
        """Return True where there are parameters: torch steps an optimizer without state to make it some, all alone."""
        return bool(self._names)

    def __repr__(self) -> str:
        return repr({self._names[param]: dict(state) for param, state in self.items()})
