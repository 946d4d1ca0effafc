"""Loading a state dict of torch's schema where a rank steps all of its parameters: planned whole, then written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from attrs import define, field, frozen

from megaopt_core.errors import StateDictError
from megaopt_core.plugin_api._observers import Change
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.state._fitting import (
    load_or_restore,
    mismatch,
    named_errors,
    require_names,
    require_same_shapes,
    require_settings,
)
from megaopt_core.state._group_settings import GroupMerge, merge_groups
from megaopt_core.state._left_out import FROM_ALL_RANKS, require_state
from megaopt_core.state._listed import (
    fresh_in,
    is_left_out,
    is_written,
    origin_in,
    origin_of,
    require_told,
    told_at,
)
from megaopt_core.state._origin import settings_of, stepped_otherwise
from megaopt_core.state._piece_load import PieceLoad
from megaopt_core.state._pieces import PieceState, piece_states

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = ["load_plain"]

SOURCE = "the state dict"
"""What errors call it."""


def load_plain(
    optimizer: StatefulOptimizer, state_dict: Mapping[str, Any], names: Sequence[str], *, strict: bool
) -> set[str]:
    """Copy a state dict into an optimizer, after all of it has been checked.

    Args:
        optimizer: a built optimizer that shares no state over ranks.
        state_dict: the state dict; nothing of it is kept.
        names: of its parameters, in the order of its groups.
        strict: names must be the same on both sides, and every state that is here must be there.

    Returns:
        The parameters whose state has been loaded without a main value.

    Raises:
        CheckpointMismatchError: it does not fit; nothing has been changed.
        StateDictError: it lacks something, or is no state dict; nothing has been changed.
    """
    saved = _saved_in(optimizer, state_dict, names)
    with named_errors(SOURCE, "it cannot be planned"):
        plan = _Plan.made(optimizer, saved, state_dict, strict=strict)
        if plan.frozen:  # they join when all else is known to fit
            plan.keep_frozen()
            plan = _Plan.made(optimizer, saved, state_dict, strict=strict)
    if strict:
        require_told(state_dict["param_groups"], names)
        without = {name for name, each in saved.items() if not each.state and not each.is_fresh}
        require_state(optimizer, without, {name for name, each in saved.items() if each.is_lacking})
    plan.apply()
    return {name for name, each in saved.items() if each.state and MAIN_PARAM not in each.state}


@frozen
class _Saved:
    """What a state dict has of one parameter.

    Args:
        state: state key to value; empty before its first step.
        group: the position of the group that has its settings; None where they were left out.
        origin: who stepped it, and as what.
        is_fresh: it was saved before its first step.
        is_lacking: it has nothing, where others have a state.
    """

    state: Mapping[str, Any]
    group: int | None
    origin: Mapping[str, Any]
    is_fresh: bool
    is_lacking: bool


def _saved_in(
    optimizer: StatefulOptimizer, state_dict: Mapping[str, Any], names: Sequence[str]
) -> dict[str, _Saved]:
    groups, states = state_dict["param_groups"], state_dict["state"]
    indices = [index for group in groups for index in group["params"]]
    if len(names) != len(indices):
        raise StateDictError(
            f"the state dict names {len(names)} parameters but lists {len(indices)}", names=names
        )
    told, fresh = [origin_in(group) for group in groups], fresh_in(state_dict)
    some = any(_is_told(values) for values in states.values())
    live = {shard.name: piece.inner for piece in piece_states(optimizer) for _, shard in piece.members}
    found = {}
    for name, index, position in zip(names, indices, told_at(groups, names), strict=True):
        values = states.get(index, {})
        if not isinstance(values, Mapping):
            raise StateDictError(f"the state of {name!r} is no mapping", names=[name])
        is_lacking = index in states and some and not _is_told(values)
        values = {key: _all_of(name, key, value) for key, value in values.items() if not _is_elsewhere(value)}
        is_fresh = name in fresh and not any(is_written(key, value) for key, value in values.items())
        kept = {
            key: value
            for key, value in values.items()
            if (not is_fresh or key == MAIN_PARAM)
            and not (is_left_out(value) and isinstance(live.get(name, {}).get(key), torch.Tensor))
        }
        origin = origin_of({} if position is None else told[position], name)
        found[name] = _Saved(kept, position, origin, is_fresh, is_lacking)
    return found


def _is_told(values: Any) -> bool:
    """Return whether a state has something in it that this rank has."""
    return isinstance(values, Mapping) and not all(map(_is_elsewhere, values.values()))


def _is_elsewhere(value: Any) -> bool:
    """Return whether a state is only said to be kept by other ranks."""
    return hasattr(value, "__create_chunk_list__") and not value.__create_chunk_list__()


def _all_of(name: str, key: str, value: Any) -> Any:
    """Return a value as it is; of one that ranks could share, its local tensor, by the protocol of torch's checkpoints.

    Raises:
        StateDictError: this rank has a part of it only.
    """
    if not hasattr(value, "__create_chunk_list__"):
        return value
    from torch.distributed.checkpoint.metadata import MetadataIndex

    for chunk in value.__create_chunk_list__():
        if chunk.sizes == value.shape:
            return value.__get_tensor_shard__(MetadataIndex(key, chunk.offsets))
    raise StateDictError(
        f"state {key!r} of {name!r} in the state dict is a part of it, others are with other ranks: {FROM_ALL_RANKS}",
        names=[name],
    )


@define
class _Plan:
    """Everything that a load will write.

    Args:
        optimizer: what is loaded.
        saved: what the state dict has, by name.
        strict: names must be the same on both sides.
        writes: what is done, in order, once all of it is known to fit.
        groups: group settings.
        scaler: the loss scaler's state.
        same: parameters whose optimizer is the one that saved their state.
        missing: `"name: key"` of state that is here but not in the state dict.
        frozen: parameters that are frozen here and have a state there, which is kept for them.
    """

    optimizer: StatefulOptimizer
    saved: Mapping[str, _Saved]
    strict: bool
    writes: list[Callable[[], None]] = field(factory=list)
    groups: GroupMerge = field(factory=GroupMerge)
    scaler: Any = None
    same: set[str] = field(factory=set)
    missing: list[str] = field(factory=list)
    frozen: list[str] = field(factory=list)

    @classmethod
    def made(
        cls,
        optimizer: StatefulOptimizer,
        saved: Mapping[str, _Saved],
        state_dict: Mapping[str, Any],
        *,
        strict: bool,
    ) -> Self:
        """Return what a load of parameters that are stepped here will write; nothing is changed.

        Args:
            optimizer: what is loaded.
            saved: what the state dict has, by name.
            state_dict: the state dict.
            strict: names must be the same on both sides.

        Raises:
            CheckpointMismatchError: something does not fit.
        """
        plan = cls(optimizer, saved, strict)
        plan.match(state_dict["param_groups"])
        plan.fill(state_dict)
        return plan

    def match(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare names, shapes and optimizers.

        Args:
            groups: of the state dict.

        Raises:
            CheckpointMismatchError: something does not fit.
        """
        optimizer, saved = self.optimizer, self.saved
        self._check_shapes()
        mine = set(optimizer.names.values())
        keepable = {} if optimizer.late is None else optimizer.late.keepable()
        self.frozen = [
            name
            for name in keepable
            if name in saved and (saved[name].state or saved[name].origin["optimizer"])
        ]
        unexpected = sorted(saved.keys() - mine - set(self.frozen))
        if self.strict:
            routing = optimizer.routing
            no_place = [name for name in (routing.frozen if routing else ()) if name in unexpected]
            lacking = [f"{name} (state)" for name in sorted(mine - saved.keys())]
            require_names(SOURCE, lacking, [f"{name} (state)" for name in unexpected], no_place)
        told = next((told for group in groups if (told := origin_in(group))), {})
        otherwise = stepped_otherwise(
            SOURCE,
            {name: {**saved[name].origin, "shape": ()} for name in optimizer.names.values() if name in saved},
            optimizer,
            plugins={each["optimizer"]: each["distribution"] for each in map(origin_in, groups) if each},
            readers=told.get("roles", ""),
            strict=self.strict,
        )
        self.same = {name for name in optimizer.names.values() if name in saved and name not in otherwise}

    def keep_frozen(self) -> None:
        """Take in the parameters that are frozen here, in groups as there."""
        here = {self.saved[name].group for name in self.optimizer.names.values() if name in self.saved}
        for position in {self.saved[name].group for name in self.frozen}:
            joining = [name for name in self.frozen if self.saved[name].group == position]
            self.optimizer.late.keep(joining, apart=position not in here)

    def _check_shapes(self) -> None:
        wrong = {}
        for piece in piece_states(self.optimizer):
            ((_, shard),) = piece.members
            if shard.name not in self.saved:
                continue
            shapes = [
                tuple(value.shape)
                for key, value in self.saved[shard.name].state.items()
                if isinstance(value, torch.Tensor) and key not in piece.part.scalar_states
            ]
            known = [
                piece.stepped.shape,
                *(each.shape for each in piece.inner.values() if hasattr(each, "shape")),
            ]
            if shapes and not any(shape in known for shape in shapes):
                wrong[shard.name] = max(shapes, key=math.prod), tuple(piece.stepped.shape)
        require_same_shapes(SOURCE, wrong)

    def fill(self, state_dict: Mapping[str, Any]) -> None:
        """Find out what will be written, and check that it fits; nothing is changed.

        Args:
            state_dict: the state dict.

        Raises:
            CheckpointMismatchError: something does not fit.
        """
        for piece in piece_states(self.optimizer):
            ((_, shard),) = piece.members
            if shard.name in self.saved:
                self._fill_piece(piece, shard.name, self.saved[shard.name])
        missing = sorted(set(self.missing))
        if missing and self.strict:
            raise mismatch(
                SOURCE,
                f"lacks state that the optimizer keeps here: {'; '.join(missing[:5])}; strict=False lets it start anew",
                [entry.partition(":")[0] for entry in missing],
            )
        self.scaler = state_dict.get("grad_scaler")
        settings = list(map(settings_of, state_dict["param_groups"]))
        group_of = {name: self.saved[name].group for name in self.same}
        self.groups = merge_groups(self.optimizer, group_of, settings)
        require_settings(SOURCE, self.optimizer, self.groups)

    def _fill_piece(self, piece: PieceState, name: str, saved: _Saved) -> None:
        state = {key: value for key, value in saved.state.items() if key != MAIN_PARAM}
        if name not in self.same:
            state = {}
        lacking = PieceLoad(piece, name, SOURCE, self.writes).plan(state, saved.state.get(MAIN_PARAM))
        self.missing += [f"{name}: {key}" for key in lacking]
        if name in self.same and saved.is_fresh:
            self.writes.append(piece.start_anew)

    def apply(self) -> None:
        """Write everything; what can refuse goes first."""
        undo: list[Callable[[], None]] = []
        try:
            self.groups.write(self.optimizer, undo)
            scaler = self.optimizer.grad_scaler
            if self.scaler is not None and scaler is not None:
                with named_errors(SOURCE, "the loss scaler does not take its state"):
                    undo.append(load_or_restore(scaler.load_state_dict, self.scaler, scaler.state_dict()))
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        with torch.no_grad(), self.optimizer.changing(Change.LOADED):
            # The model may have been loaded by somebody else.
            for write in self.writes:
                write()
        self.groups.warn()
