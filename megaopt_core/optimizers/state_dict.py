"""State dicts in torch's schema, with parameter names; loading is by name, in place, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import StateDictError

if TYPE_CHECKING:
    from megaopt_core.optimizers.base import MegatronOptimizer

__all__ = ["export_state_dict", "import_state_dict"]

MAIN_PARAM = "main_param"
_SCALER = "grad_scaler"


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
            values = {key: _without_attributes(value) for key, value in optimizer.state[param].items()}
            if values:
                state[index] = values
            index += 1
        groups.append(packed)
    exported: dict[str, Any] = {"state": state, "param_groups": groups}
    if optimizer.grad_scaler is not None:
        exported[_SCALER] = optimizer.grad_scaler.state_dict()
    return exported


def _without_attributes(value: Any) -> Any:
    """Return a main parameter as a plain tensor of the same memory: what is attached to it must not be pickled."""
    return value.detach() if isinstance(value, torch.nn.Parameter) else value


@define
class _Saved:
    """A state dict, taken apart: parameter name to state and group settings."""

    state: dict[str, Mapping[str, Any]] = field(factory=dict)
    group_of: dict[str, Mapping[str, Any]] = field(factory=dict)
    groups: list[Mapping[str, Any]] = field(factory=list)


def _take_apart(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any]) -> _Saved:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise StateDictError("an optimizer state dict has the keys 'state' and 'param_groups'")
    saved = _Saved(groups=list(state_dict["param_groups"]))
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
    for name, index in by_name.items():
        values = state_dict["state"].get(index, {})
        if not isinstance(values, Mapping):
            raise StateDictError(f"the state of {name!r} is no mapping", names=[name])
        saved.state[name] = values
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
    for param, name in optimizer.names.items():
        present = optimizer.state[param]
        for key, value in saved.state.get(name, {}).items():
            mine = present.get(key)
            both = isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor)
            if both and mine.shape != value.shape and not mine.numel() == value.numel() == 1:
                raise StateDictError(
                    f"state {key!r} of {name!r} has shape {tuple(value.shape)} in the state dict and "
                    f"{tuple(mine.shape)} here",
                    names=[name],
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
    scaler = state_dict.get(_SCALER)
    if scaler and optimizer.grad_scaler is not None:
        optimizer.grad_scaler.load_state_dict(scaler)
    with torch.no_grad():
        for param, name in optimizer.names.items():
            if name in saved.state:
                _load_param(optimizer, param, saved.state[name])
    _load_groups(optimizer, saved)


def _load_param(optimizer: MegatronOptimizer, param: torch.nn.Parameter, values: Mapping[str, Any]) -> None:
    present = optimizer.state[param]
    for key, value in values.items():
        mine = present.get(key)
        if key == MAIN_PARAM:
            _load_main(optimizer, param, torch.as_tensor(value))
        elif isinstance(mine, torch.Tensor):
            mine.copy_(torch.as_tensor(value).reshape(mine.shape))
        elif isinstance(value, torch.Tensor):
            present[key] = value.detach().clone().to(param.device)
        else:
            present[key] = value


def _load_main(optimizer: MegatronOptimizer, param: torch.nn.Parameter, value: torch.Tensor) -> None:
    present = optimizer.state[param]
    if MAIN_PARAM in present:
        present[MAIN_PARAM] = value.reshape(present[MAIN_PARAM].shape)


def _load_groups(optimizer: MegatronOptimizer, saved: _Saved) -> None:
    same_number = len(saved.groups) == len(optimizer.param_groups)
    for position, group in enumerate(optimizer.param_groups):
        sources = [
            saved.group_of[optimizer.names[param]] for param in group["params"] if optimizer.names[param] in saved.group_of
        ]
        if not sources and same_number and not group["params"]:
            sources = [saved.groups[position]]
        if not sources:
            continue
        for key, value in sources[0].items():
            if key not in ("params", "param_names") and all(_equal(source.get(key), value) for source in sources[1:]):
                _set(group, key, value)


def _equal(left: Any, right: Any) -> bool:
    return left is right or bool(left == right)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    if isinstance(group.get(key), torch.Tensor):
        group[key].fill_(value)
    else:
        group[key] = value
