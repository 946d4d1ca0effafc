"""Optimizer state under the parameters that users know: the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.execution._placeholders import StatePlaceholder, is_placeholder
from megaopt_core.optimizers._joined_state import JoinedState
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.params._parts import local_tensor
from megaopt_core.params._shards import Box, Shard, whole
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.sharding._elements import elements_of

__all__ = ["LiveState", "ParamState"]

_REQUIRED: Any = object()


class ParamState(MutableMapping[str, Any]):
    """The live state of one parameter: the inner optimizer's, what the precision policy keeps, and what its owner does.

    State of whole tensors that a split step keeps is shown on the rank that owns them, as it is.

    Of a piece with several members, state tensors of the piece's shape show the member's elements: a view in the
    parameter's shape where the piece holds all of it, else flat. State that the policy stores with a scale (fp16,
    fp8 and 8-bit moments) and main values that it splits are computed when they are read; assign them to change them.

    Args:
        part: the part that steps the parameter.
        index: position of its piece.
        member: `(offset, shard)` inside the piece; None: the piece is the parameter.
    """

    member: tuple[int, Shard] | None

    def __init__(self, part: OptimizerPart, index: int, member: tuple[int, Shard] | None = None) -> None:
        self._part = part
        self._index = index
        self.member = member

    @property
    def _inner(self) -> MutableMapping[str, Any]:
        state: MutableMapping[str, Any] = self._part.inner.state[self._part.stepped[self._index]]
        return state

    @property
    def _owned(self) -> MutableMapping[str, Any]:
        """What this rank keeps as the one that transforms the parameter's updates."""
        split = self._part.split
        return {} if split is None else split.transform_state.get(self._name, {})

    @property
    def _name(self) -> str:
        ((_, first), *_) = self._part.pieces[self._index].spec.members
        return first.name if self.member is None else self.member[1].name

    def belongs_to_owner(self, key: str) -> bool:
        """Return whether a state is kept by the rank that transforms the parameter's updates.

        Args:
            key: the state's key.
        """
        return self._part.split is not None and key in self._part.split.transform_keys

    def _whole(self, key: str) -> Any:
        if key in self._part.precision.extra_keys(self._index):
            return self._part.precision.extra_state(self._index)[key]
        return self._part.precision.read_state(self._index, key, self._inner)

    def _store(self, key: str, value: Any) -> None:
        if key == MAIN_PARAM or key in self._part.precision.extra_keys(self._index):
            self._part.precision.set_extra_state(self._index, key, value)
        else:
            self._part.precision.write_state(self._index, key, self._inner, value)

    def _is_cut(self, value: Any) -> bool:
        if self.member is None or not isinstance(value, torch.Tensor):
            return False
        return value.shape == self._part.stepped[self._index].shape and value.dim() > 0

    def __getitem__(self, key: str) -> Any:
        if self.belongs_to_owner(key):
            return self._owned[key]
        value = self._whole(key)
        if self.member is None or not self._is_cut(value):
            return value
        offset, shard = self.member
        elements = value.detach().view(-1)[offset : offset + shard.numel]
        sizes = shard.box[1]
        return elements.view(sizes) if shard.numel == torch.Size(sizes).numel() else elements

    def __setitem__(self, key: str, value: Any) -> None:
        if self.belongs_to_owner(key):
            self._set_owned(key, value)
            return
        whole = self._whole(key) if key in self else self._new_whole(value)
        if self.member is None or not self._is_cut(whole) or not isinstance(value, torch.Tensor):
            self._store(key, value)
            return
        offset, shard = self.member
        with torch.no_grad():
            changed = whole.detach().clone()
            changed.view(-1)[offset : offset + shard.numel].copy_(value.reshape(-1))
        self._store(key, changed)

    def _set_owned(self, key: str, value: Any) -> None:
        """Set what the owner keeps; on every other rank it has no place."""
        owned = self._owned
        present = owned.get(key)
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            with torch.no_grad():
                present.copy_(value.reshape(present.shape))
        elif owned:
            owned[key] = value

    @property
    def numel(self) -> int:
        """Elements of the parameter that are stepped here."""
        if self.member is not None:
            return self.member[1].numel
        return self._part.stepped[self._index].numel()

    def is_elementwise(self, key: str) -> bool:
        """Return whether a state has one element for each of the parameter's that are stepped here.

        Args:
            key: the state's key.
        """
        return key in self and not self.belongs_to_owner(key) and self._is_cut(self._whole(key))

    @property
    def is_fresh(self) -> bool:
        """True before the first step, while nothing was written here: that step will make the state."""
        return is_placeholder(self._inner)

    def start_anew(self) -> None:
        """Give up the state of the whole piece; the inner optimizer makes it in its next step."""
        if self._inner:
            inner = self._part.inner
            inner.state[self._part.stepped[self._index]] = StatePlaceholder(self._inner)
        if self._part.split is not None and self._owned:
            self._part.split.transform_state[self._name] = StatePlaceholder(self._owned)

    def clear(self) -> None:
        """Give up the state, as for an optimizer that is built anew; the main value stays.

        Raises:
            UnsupportedOperationError: the state of other parameters lies in the same tensors.
        """
        if self.member is not None and len(self._part.pieces[self._index].spec.members) > 1:
            raise UnsupportedOperationError(
                f"the state of {self._name!r} lies in one tensor with that of other parameters and cannot be given up "
                "alone: optimizer.state.clear() gives up that of all, and state[param][key] = value sets its elements"
            )
        self.start_anew()

    def take_model(self, param: torch.Tensor, box: Box | None = None) -> None:
        """Start the main value again from the model's, where there is one.

        Args:
            param: the model's parameter.
            box: the part of the logical tensor that it is; None: its shape tells.
        """
        if MAIN_PARAM in self:
            elements = local_tensor(param).detach().float()
            if self.member is not None:
                shard, shape = self.member[1], tuple(elements.shape)
                if box is None or box[1] != shape:
                    box = whole(shape) if shape == shard.shape else shard.box
                elements = elements_of(elements, box, shard)
            self[MAIN_PARAM] = elements

    def _new_whole(self, value: Any) -> Any:
        """Return zeros of the piece's shape for state that the inner optimizer has not made yet."""
        if self.member is None or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        fits = value.numel() == self.member[1].numel
        stepped = self._part.stepped[self._index]
        return torch.zeros(stepped.shape, dtype=value.dtype, device=stepped.device) if fits else None

    def __delitem__(self, key: str) -> None:
        del self._inner[key]

    def __iter__(self) -> Iterator[str]:
        yield from (key for key in self._inner if not self._part.precision.is_code(key))
        yield from self._owned
        yield from self._part.precision.extra_keys(self._index)

    def __contains__(self, key: object) -> bool:
        return any(key == mine for mine in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


type State = ParamState | JoinedState
"""The live state of one parameter."""


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
        found: dict[torch.nn.Parameter, list[ParamState]] = {}
        for part in parts:
            for index, piece in enumerate(part.pieces):
                members = piece.spec.members
                is_param = len(members) == 1 and piece.param.shape == piece.model_params[0].shape
                for param, member in zip(piece.model_params, members, strict=True):
                    found.setdefault(param, []).append(ParamState(part, index, None if is_param else member))
        self._where: dict[torch.nn.Parameter, State] = {
            param: states[0] if len(states) == 1 else JoinedState(states) for param, states in found.items()
        }

    def cut_names(self) -> tuple[str, ...]:
        """Return the parameters of which this rank steps a part only, or nothing while another rank does."""
        return tuple(
            name for param, name in self._names.items() if self._stepped_elements(param) < param.numel()
        )

    def _stepped_elements(self, param: torch.nn.Parameter) -> int:
        found = self._where.get(param)
        return 0 if found is None else found.numel

    def __getitem__(self, param: torch.nn.Parameter) -> MutableMapping[str, Any]:
        found = self._where.get(param)
        if found is not None:
            return found
        if param in self._names:
            return {}
        raise KeyError(param)

    def __setitem__(self, param: torch.nn.Parameter, state: Mapping[str, Any]) -> None:
        present = self[param]
        for key, value in state.items():
            present[key] = value
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
