"""State dicts in torch's schema as something to load from: what was saved in them is read by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from megaopt_checkpoint.collected import state_key
from megaopt_checkpoint.restore.source import MemorySource
from megaopt_checkpoint.state_dicts.over_ranks import StateOfOtherRanks
from megaopt_checkpoint.stored import Manifest
from megaopt_checkpoint.values.encoding import AsIs
from megaopt_checkpoint.values.sliced import SlicedTensor, joined, sliced
from megaopt_core.errors import StateDictError
from megaopt_core.params import Shard, is_dtensor, local_tensor, whole
from megaopt_core.precision import MAIN_PARAM
from megaopt_core.state import (
    PieceState,
    fresh_in,
    is_left_out,
    is_number,
    is_written,
    origin_in,
    origin_of,
    piece_states,
    settings_of,
    told_at,
)

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["lacking_state", "torch_source"]


def lacking_state(state_dict: Mapping[str, Any], names: Sequence[str]) -> set[str]:
    """Return the parameters whose state was left out of a state dict, which tells of it by having nothing in its place.

    A parameter without an entry has never been stepped: so torch's optimizers say it, and one that has no state at all
    leaves every entry empty.

    Args:
        state_dict: a state dict of torch's schema.
        names: of its parameters, in the order of its groups.
    """
    state = state_dict["state"]
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    told = {
        index: not all(map(_is_boxless, values.values()))
        for index, values in state.items()
        if isinstance(values, Mapping)
    }
    return {
        name
        for name, index in zip(names, indices, strict=False)
        if isinstance(state.get(index), StateOfOtherRanks)
        or (told.get(index) is False and any(told.values()))
    }


def _is_boxless(value: Any) -> bool:
    """Return whether a state is only said to be kept by other ranks."""
    return isinstance(value, SlicedTensor) and not value.chunks


def torch_source(
    optimizer: MegatronOptimizer,
    state_dict: Mapping[str, Any],
    names: Sequence[str],
    renamed: Callable[[str], str] = lambda name: name,
) -> MemorySource:
    """Return a state dict as something to load from; a load takes over its settings, whatever is configured.

    Args:
        optimizer: what will load it: knows shapes, and which keys are one number for a parameter.
        state_dict: the state dict; nothing of it is copied.
        names: of its parameters, in the order of its groups.
        renamed: name in the state dict to name here.

    Raises:
        StateDictError: the names do not fit its groups, the state of a parameter is no mapping, or those that are fresh
            are no list of names.
    """
    groups = state_dict["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    if len(names) != len(indices):
        raise StateDictError(
            f"the state dict names {len(names)} parameters but lists {len(indices)}", names=names
        )
    here, tensors, fresh = _Here(optimizer), dict[str, torch.Tensor](), fresh_in(state_dict)
    routed = [origin_in(group) for group in groups]
    parameters: dict[str, Any] = {}
    for name, index, position in zip(names, indices, told_at(groups, names), strict=True):
        values = state_dict["state"].get(index, {})
        if not isinstance(values, Mapping):
            raise StateDictError(f"the state of {name!r} is no mapping", names=[name])
        is_fresh = name in fresh and not any(is_written(key, value) for key, value in values.items())
        name_here = renamed(name)
        kept = {
            key: value
            for key, value in values.items()
            if not _is_boxless(value)
            and (not is_fresh or key == MAIN_PARAM)
            and not (is_left_out(value) and here.keeps(name_here, key))
        }
        shape = here.shape(name_here, kept)
        told = {} if position is None else routed[position]
        parameters[name] = {
            **origin_of(told, name),
            "group": position,
            "shape": list(shape),
            "state": {
                key: here.record(name, name_here, key, value, shape, tensors)
                for key, value in kept.items()
                if not here.is_nothing(name_here, value)
            },
            **({"fresh": True} if is_fresh else {}),
        }
    described = {
        "parameters": parameters,
        "groups": [{"settings": AsIs(settings_of(group)), "configured": {}} for group in groups],
        "scaler": AsIs(state_dict.get("grad_scaler")),
    }
    plugins = {told["optimizer"]: told["distribution"] for told in routed if told}
    roles = next((told["roles"] for told in routed if told), "")
    manifest = Manifest(optimizer=described, plugins=plugins, written={"roles": roles} if roles else {})
    return MemorySource("the state dict", manifest, tensors)


class _Here:
    """What is known here of the parameters that a state dict names."""

    def __init__(self, optimizer: MegatronOptimizer) -> None:
        self._pieces: dict[str, list[tuple[PieceState, Shard]]] = {}
        for piece in piece_states(optimizer):
            for _, shard in piece.members:
                self._pieces.setdefault(shard.name, []).append((piece, shard))
        self._params = {name: param for param, name in optimizer.names.items()}
        self._every = frozenset[str]().union(*(part.scalar_states for part in optimizer.parts))

    def keeps(self, name: str, key: str) -> bool:
        """Return whether this rank has a tensor of a parameter's state."""
        return any(isinstance(piece.inner.get(key), torch.Tensor) for piece, _ in self._pieces.get(name, ()))

    def _is_number(self, name: str, key: str) -> bool:
        """Return whether a state is one number for a parameter; where another rank steps it, it is if it ever is."""
        pieces = self._pieces.get(name)
        return key in (pieces[0][0].part.scalar_states if pieces else self._every)

    def shape(self, name: str, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Return a parameter's shape: what it is here if some state fits that, else that of the largest state."""
        tensors = {
            key: value
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and not self._is_number(name, key)
        }
        if name in self._pieces:
            ((piece, shard), *_) = self._pieces[name]
            known = [shard.shape, *(value.shape for value in piece.inner.values() if hasattr(value, "shape"))]
            if not tensors or any(v.shape in known or self._is_part(name, k, v) for k, v in tensors.items()):
                return shard.shape
        return max((tuple(tensor.shape) for tensor in tensors.values()), key=math.prod, default=())

    def _stepped(self, name: str, key: str) -> list[Shard]:
        """Return which elements of a parameter this rank keeps a state of, piece by piece."""
        return [shard for piece, shard in self._pieces.get(name, ()) if piece.holds(key)]

    def _is_part(self, name: str, key: str, value: torch.Tensor) -> bool:
        """Return whether a tensor has the elements that this rank steps of a parameter that is cut."""
        shards = self._stepped(name, key)
        stepped = sum(shard.numel for shard in shards)
        is_cut = len(shards) > 1 or stepped < math.prod(shards[0].shape if shards else ())
        return is_cut and stepped == value.numel()

    def is_nothing(self, name: str, value: Any) -> bool:
        """Return whether a state is the part of a DTensor that a rank has which steps nothing of it."""
        is_dtensor_state = isinstance(value, torch.Tensor) and is_dtensor(value)
        return is_dtensor_state and name not in self._pieces and local_tensor(value).numel() == 0

    def record(
        self,
        name: str,
        here: str,
        key: str,
        value: Any,
        shape: tuple[int, ...],
        tensors: dict[str, torch.Tensor],
    ) -> dict[str, Any]:
        """Return a state's record, and put it into `tensors` if it has one element for each of its parameter."""
        stored = state_key(name, key)
        is_tensor = isinstance(value, torch.Tensor) and not self._is_number(here, key)
        local = _local_like(self._params.get(here), value) if is_tensor else None
        if local is not None and sum(shard.numel for shard in self._stepped(here, key)) == local.numel():
            tensors[stored] = self._slices(here, key, local)
        elif is_tensor and tuple(value.shape) == shape:
            tensors[stored] = value.detach()
        elif is_tensor and self._is_part(here, key, value):
            tensors[stored] = self._slices(here, key, value.detach())
        elif is_number(value):
            return {"value": AsIs(value)}
        else:
            return {"objects": [[*whole(shape), AsIs(value)]]}
        return {"tensor": stored}

    def _slices(self, name: str, key: str, value: torch.Tensor) -> SlicedTensor:
        """Return the elements that this rank steps, flat one piece after the other, as parts of the whole."""
        shards = self._stepped(name, key)
        parts = zip(shards, value.reshape(-1).split([shard.numel for shard in shards]), strict=True)
        return reduce(
            joined, (sliced(shard, value.dtype, value.device, part.flatten) for shard, part in parts)
        )


def _local_like(param: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor | None:
    """Return the local tensor of a DTensor that is cut as a parameter is; None for anything else."""
    if param is None or not is_dtensor(param) or not is_dtensor(value):
        return None
    ours: Any = param
    theirs: Any = value
    same = (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
    return local_tensor(value) if same and ours.shape == theirs.shape else None
