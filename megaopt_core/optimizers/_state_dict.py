"""State dicts in torch's schema, with parameter names; loading is by name, in place, all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import StateDictError
from megaopt_core.optimizers._joined_state import JoinedState
from megaopt_core.optimizers._live_state import ParamState
from megaopt_core.precision._policy import MAIN_PARAM

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["export_state_dict", "import_state_dict"]

_SCALER = "grad_scaler"
_FRESH = "fresh"
"""Names of the parameters whose state, before their first step, is only a place to load into."""

_NOT_LOADED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Group keys that say where parameters are, or how torch computes in this process: they stay as they were built."""


def export_state_dict(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return `{"state": {index: {...}}, "param_groups": [...]}`, tensors not copied.

    Args:
        optimizer: a built optimizer.
    """
    groups, state, index = [], {}, 0
    for group in optimizer.param_groups:
        packed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        packed["params"] = list(range(index, index + len(group["params"])))
        packed["param_names"] = [optimizer.names[param] for param in group["params"]]
        for param in group["params"]:
            state[index] = {key: _without_attributes(value) for key, value in optimizer.state[param].items()}
            index += 1
        groups.append(packed)
    if not any(state.values()):
        state = {}  # as in torch; where others have state, torch's own loader wants every parameter listed
    exported: dict[str, Any] = {"state": state, "param_groups": groups}
    if optimizer.grad_scaler is not None:
        exported[_SCALER] = optimizer.grad_scaler.state_dict()
    fresh = [optimizer.names[param] for param, values in optimizer.state.items() if values.is_fresh]
    if fresh:
        exported[_FRESH] = fresh
    return exported


def _without_attributes(value: Any) -> Any:
    """Return a main parameter as a plain tensor of the same memory: what is attached to it must not be pickled."""
    return value.detach() if isinstance(value, torch.nn.Parameter) else value


def _local(value: Any, mine: Any) -> Any:
    """Return this rank's elements of a slice of a sharded tensor, shaped as they are here; anything else as it is."""
    flat = getattr(value, "flat_local", None)
    if flat is None:
        return value
    elements: torch.Tensor = flat()
    fits = isinstance(mine, torch.Tensor) and mine.numel() == elements.numel()
    return elements.view(mine.shape) if fits else elements


@define
class _Saved:
    """A state dict, taken apart: parameter name to state and group settings."""

    state: dict[str, Mapping[str, Any]] = field(factory=dict)
    group_of: dict[str, Mapping[str, Any]] = field(factory=dict)
    groups: list[Mapping[str, Any]] = field(factory=list)
    fresh: frozenset[str] = field(factory=frozenset, converter=frozenset)


def _take_apart(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any]) -> _Saved:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise StateDictError("an optimizer state dict has the keys 'state' and 'param_groups'")
    saved = _Saved(groups=list(state_dict["param_groups"]), fresh=state_dict.get(_FRESH, ()))
    ours = [optimizer.names[param] for group in optimizer.param_groups for param in group["params"]]
    theirs = [index for group in saved.groups for index in group["params"]]
    named = all("param_names" in group for group in saved.groups)
    if named:
        names = [name for group in saved.groups for name in group["param_names"]]
    elif theirs and all(isinstance(index, str) for index in theirs):
        names = list(theirs)
    elif len(theirs) == len(ours):
        names = ours
    else:
        raise StateDictError(
            f"the state dict has {len(theirs)} parameters without names, this optimizer has {len(ours)}; without names "
            "only the position can match them"
        )
    if len(names) != len(theirs):
        raise StateDictError(f"the state dict names {len(names)} parameters but lists {len(theirs)}")
    by_name = dict(zip(names, theirs, strict=True))
    present = {name: optimizer.state[param] for param, name in optimizer.names.items()}
    for name, index in by_name.items():
        values = state_dict["state"].get(index, {})
        if not isinstance(values, Mapping):
            raise StateDictError(f"the state of {name!r} is no mapping", names=[name])
        mine = present.get(name, {})
        saved.state[name] = {key: _local(value, mine.get(key)) for key, value in values.items()}
    position = 0
    for group in saved.groups:
        for _ in group["params"]:
            saved.group_of[names[position]] = group
            position += 1
    return saved


def _check(optimizer: MegatronOptimizer, saved: _Saved, strict: bool) -> None:
    ours = set(optimizer.names.values())
    missing, extra = sorted(ours - set(saved.state)), sorted(set(saved.state) - ours)
    if strict and (missing or extra):
        raise StateDictError(
            f"the state dict does not fit: missing {missing or 'none'}, unexpected {extra or 'none'}; "
            "strict=False loads what fits",
            names=[*missing, *extra],
        )
    stepped = any(part.changes.has_step for part in optimizer.parts)
    for param, name in optimizer.names.items():
        if name not in saved.state:
            continue
        present, values = optimizer.state[param], saved.state[name]
        for key, value in values.items():
            if value is not None and key in present:
                _check_value(name, key, value, present[key])
        tensors = {key for key, mine in present.items() if isinstance(mine, torch.Tensor)} - {MAIN_PARAM}
        lacking = sorted(key for key in tensors if values.get(key) is None)
        is_fresh = not any(isinstance(value, torch.Tensor) for value in values.values())
        if strict and lacking and not (is_fresh and not stepped):
            raise StateDictError(
                f"the state dict has no {', '.join(map(repr, lacking))} of {name!r}; strict=False leaves what this "
                "optimizer has",
                names=[name],
            )


def _check_value(name: str, key: str, value: Any, mine: Any) -> None:
    if not isinstance(mine, torch.Tensor):
        return
    if not isinstance(value, (torch.Tensor, int, float)):
        raise StateDictError(
            f"state {key!r} of {name!r} is a {type(value).__name__} in the state dict and a tensor here",
            names=[name],
        )
    theirs = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
    if theirs != tuple(mine.shape) and not torch.Size(theirs).numel() == mine.numel() == 1:
        raise StateDictError(
            f"state {key!r} of {name!r} has shape {theirs} in the state dict and {tuple(mine.shape)} here",
            names=[name],
        )


def _check_groups(optimizer: MegatronOptimizer, saved: _Saved) -> None:
    for group, settings in _group_settings(optimizer, saved):
        for key, value in settings.items():
            is_number = isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1
            )
            if isinstance(group.get(key), torch.Tensor) and not is_number:
                raise StateDictError(
                    f"setting {key!r} of a group is a tensor here, the state dict has {value!r}"
                )


def import_state_dict(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Copy a state dict into an optimizer, after all of it has been checked.

    Args:
        optimizer: a built optimizer.
        state_dict: what :func:`export_state_dict` returned, or torch's own.
        strict: names must be the same on both sides.

    Raises:
        StateDictError: it does not fit; nothing has been changed.
    """
    saved = _take_apart(optimizer, state_dict)
    _check(optimizer, saved, strict)
    _check_groups(optimizer, saved)
    scaler = state_dict.get(_SCALER)
    if scaler and optimizer.grad_scaler is not None:
        optimizer.grad_scaler.load_state_dict(scaler)
    with torch.no_grad():
        for param, name in optimizer.names.items():
            if name in saved.state:
                _load_param(optimizer, param, saved.state[name], name in saved.fresh)
    for group, settings in _group_settings(optimizer, saved):
        for key, value in settings.items():
            _set(group, key, value)


def _load_param(
    optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: Mapping[str, Any], is_fresh: bool
) -> None:
    present = optimizer.state[param]
    if (
        is_fresh
        and isinstance(present, (ParamState, JoinedState))
        and present.member is None
        and _are_zero(values)
    ):
        present.start_anew()
        values = {key: value for key, value in values.items() if key == MAIN_PARAM}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            if key != MAIN_PARAM or key in present:
                present[key] = value if key in present else value.detach().clone().to(param.device)
        elif value is None or not isinstance(present.get(key), torch.Tensor):
            if not isinstance(present.get(key), torch.Tensor):
                present[key] = value
        else:
            present[key] = torch.as_tensor(value)
    if isinstance(present, (ParamState, JoinedState)) and values.get(MAIN_PARAM) is None:
        # A plain optimizer's state: the model's parameter is the only value there is.
        entry = None if optimizer.routing is None else optimizer.routing.params.get(optimizer.names[param])
        present.take_model(param, None if entry is None else entry.box)


def _are_zero(values: Mapping[str, Any]) -> bool:
    """Return whether nobody wrote into places that were exported before the first step."""
    tensors = [
        value for key, value in values.items() if isinstance(value, torch.Tensor) and key != MAIN_PARAM
    ]
    return not any(bool(tensor.any()) for tensor in tensors)


def _group_settings(
    optimizer: MegatronOptimizer, saved: _Saved
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each group with what is loaded into it: the settings that all its parameters had."""
    same_number = len(saved.groups) == len(optimizer.param_groups)
    for position, group in enumerate(optimizer.param_groups):
        names = [optimizer.names[param] for param in group["params"]]
        sources = [saved.group_of[name] for name in names if name in saved.group_of]
        if not names and same_number:
            sources = [saved.groups[position]]
        if sources:
            first, *others = sources
            yield (
                group,
                {
                    key: value
                    for key, value in first.items()
                    if key not in _NOT_LOADED and all(_equal(other.get(key), value) for other in others)
                },
            )


def _equal(left: Any, right: Any) -> bool:
    return left is right or bool(left == right)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
