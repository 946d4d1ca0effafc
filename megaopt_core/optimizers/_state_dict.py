"""State dicts in torch's schema, with parameter names; loading is by name, in place, all or nothing.

Main parameters start from a model's state dict, which may be more precise than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError, UnsupportedOperationError
from megaopt_core.optimizers._param_state import ParamState
from megaopt_core.params._names import without_wrappers
from megaopt_core.registry._catalogue import CHECKPOINT_READER
from megaopt_core.registry._registry import get_registry
from megaopt_core.state._left_out import with_left_out
from megaopt_core.state._listed import names_of
from megaopt_core.state._origin import ROUTED, STEPPED, routed_of
from megaopt_core.state._plain_load import load_plain

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer
    from megaopt_core.plugin_api._shared_state import SharedState

__all__ = ["export_state_dict", "import_state_dict", "model_values", "start_main_value"]

_REPLICATED = "replicated"
_SCALER = "grad_scaler"
_FRESH = "fresh"
"""Names of the parameters whose state, before their first step, is only a place to load into."""


def export_state_dict(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return `{"state": {index: {...}}, "param_groups": [...]}`, tensors not copied.

    Args:
        optimizer: a built optimizer.

    Raises:
        PluginNotInstalledError: ranks share its state, and no plugin says how a state dict shows that.
    """
    shared = _shared_state_of(optimizer)
    states = _states(optimizer) if shared is None else shared.states()
    groups, state, index = [], {}, 0
    routed = routed_of(optimizer)
    for position, group in enumerate(optimizer.param_groups):
        packed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        packed["params"] = list(range(index, index + len(group["params"])))
        packed["param_names"] = [optimizer.names[param] for param in group["params"]]
        if routed:
            packed[ROUTED] = routed[position]
        state.update(
            {at: states[name] for at, name in enumerate(packed["param_names"], index) if name in states}
        )
        index += len(group["params"])
        groups.append(packed)
    exported: dict[str, Any] = {"state": state, "param_groups": groups}
    if optimizer.grad_scaler is not None:
        exported[_SCALER] = optimizer.grad_scaler.state_dict()
    fresh = [optimizer.names[param] for param, values in optimizer.state.items() if values.is_fresh]
    if routed:
        stepped = "\n".join(
            name
            for group in groups
            for name in group["param_names"]
            if states.get(name) and name not in fresh
        )
        for group in groups:
            group[ROUTED][STEPPED] = stepped
    if fresh:
        exported[_FRESH] = fresh
    return exported


def _states(optimizer: MegatronOptimizer) -> dict[str, dict[str, Any]]:
    """Return the state of every parameter; nothing where no parameter has any, as in torch."""
    kept: dict[str, Any] = {name: optimizer.state[param] for param, name in optimizer.names.items()}
    states = {name: {key: state.exported(key) for key in state} for name, state in kept.items()}
    return states if any(states.values()) else {}


def _shared_state_of(optimizer: MegatronOptimizer) -> SharedState | None:
    """Return how state dicts show what ranks share; None where each rank steps all of its parameters.

    Args:
        optimizer: a built optimizer.

    Raises:
        PluginNotInstalledError: no plugin says it; on all ranks, before any of them waits for another.
    """
    routing = optimizer.routing
    strategies = set() if routing is None else {child.strategy for child in routing.children}
    if strategies <= {_REPLICATED} and not optimizer.state.cut_names() and optimizer.state.is_by_param:
        return None
    registry = get_registry()
    for _, answer in registry.call_each("megaopt_shared_state", optimizer=optimizer):
        found: SharedState = answer
        return found
    named = ", ".join(map(repr, sorted(strategies - {_REPLICATED}))) or "a strategy"
    what = f"a state dict that {named} shares out over ranks"
    raise registry.absent_plugin(what, what, CHECKPOINT_READER) or UnsupportedOperationError(
        f"no installed plugin can show {what}: pip install --upgrade {CHECKPOINT_READER}"
    )


def import_state_dict(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Copy a state dict into an optimizer, after all of it has been checked.

    Args:
        optimizer: a built optimizer.
        state_dict: what :func:`export_state_dict` returned, or torch's own.
        strict: names must be the same on both sides.

    Raises:
        StateDictError: it does not fit; nothing has been changed.
        PluginNotInstalledError: ranks share its state, and no plugin says how a state dict shows that.
    """
    shared = _shared_state_of(optimizer)
    names = names_of(optimizer, state_dict)
    if shared is not None:
        without_main = shared.load(state_dict, names, strict=strict)
    else:
        whole = with_left_out(optimizer, state_dict, names) if strict else state_dict
        without_main = load_plain(optimizer, whole, names, strict=strict)
    for param, name in optimizer.names.items():
        if name in without_main:
            # A plain optimizer's state: the model's parameter is the only value there is.
            start_main_value(optimizer, param, param)


def model_values(
    optimizer: MegatronOptimizer, state_dict: Mapping[str, Any]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return what a model's state dict has for the parameters of an optimizer.

    Args:
        optimizer: a built optimizer.
        state_dict: parameter name to value; names may have prefixes that wrappers put in.

    Raises:
        StateDictError: it lacks a parameter, or has another shape of one.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(
            "reload_model_params(state_dict) takes a mapping of parameter names to tensors, got "
            f"{type(state_dict).__name__}"
        )
    known = set(optimizer.names.values())
    values = {without_wrappers(name): value for name, value in state_dict.items()}
    values.update((name, value) for name, value in state_dict.items() if name in known)
    missing = [name for name in optimizer.names.values() if name not in values]
    if missing:
        raise StateDictError(
            f"reload_model_params(state_dict): the state dict lacks {len(missing)} parameters, such as "
            f"{', '.join(missing[:3])}",
            names=missing,
        )
    for param, name in optimizer.names.items():
        value = values[name]
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateDictError(
                f"reload_model_params(state_dict): {name!r} is {given} in the state dict and of shape "
                f"{tuple(param.shape)} in the model",
                names=[name],
            )
    return {param: values[name] for param, name in optimizer.names.items()}


@torch.no_grad()
def start_main_value(optimizer: MegatronOptimizer, param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the main value of one parameter, where this rank steps some of it.

    Args:
        optimizer: a built optimizer.
        param: the model's parameter.
        value: this rank's part of the new value, or all of it.
    """
    state = optimizer.state[param]
    if isinstance(state, ParamState):
        entry = None if optimizer.routing is None else optimizer.routing.params.get(optimizer.names[param])
        state.take_model(value, None if entry is None else entry.box)
