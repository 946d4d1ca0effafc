"""Main parameters that start from a model's state dict, which may be more precise than the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.optimizers._param_state import ParamState
from megaopt_core.params._names import without_wrappers

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["model_values", "start_main_value"]


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
            f"reload_model_params(state_dict): a mapping of parameter names to tensors, got {type(state_dict).__name__}"
        )
    known = set(optimizer.names.values())
    values = {without_wrappers(name): value for name, value in state_dict.items()}
    values.update((name, value) for name, value in state_dict.items() if name in known)
    missing = [name for name in optimizer.names.values() if name not in values]
    if missing:
        raise StateDictError(
            f"reload_model_params(state_dict): it lacks {len(missing)} parameters, such as {', '.join(missing[:3])}",
            names=missing,
        )
    for param, name in optimizer.names.items():
        value = values[name]
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateDictError(
                f"reload_model_params(state_dict): {name!r} is {given} there and of shape {tuple(param.shape)} in the "
                "model",
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
