"""Everything that a step may change, copied, and compared bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["differences", "layout", "params_of", "same_bits", "settings_of", "snapshot", "state_of"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, Mapping):
        for key, inside in value.items():
            _flatten(f"{prefix}[{key!r}]", inside, into)
    elif isinstance(value, (list, tuple)):
        into[f"{prefix} (length)"] = len(value)
        for index, inside in enumerate(value):
            _flatten(f"{prefix}[{index}]", inside, into)
    else:
        into[prefix] = value.detach().clone() if isinstance(value, torch.Tensor) else value


def params_of(optimizer: MegatronOptimizer) -> dict[str, torch.Tensor]:
    """Return copies of the model's parameters by name.

    Args:
        optimizer: a built optimizer.
    """
    return {name: param.detach().clone() for param, name in optimizer.names.items()}


def state_of(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return copies of the optimizer's state, nested values flattened into their keys.

    Args:
        optimizer: a built optimizer.
    """
    copied: dict[str, Any] = {}
    for param, name in optimizer.names.items():
        for key, value in optimizer.state[param].items():
            _flatten(f"state {key!r} of {name}", value, copied)
    return copied


def settings_of(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return copies of the settings of every group.

    Args:
        optimizer: a built optimizer.
    """
    copied: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                _flatten(f"{key!r} of group {index}", value, copied)
    return copied


def snapshot(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return copies of parameters, state and group settings.

    Args:
        optimizer: a built optimizer.
    """
    params = {f"parameter {name}": value for name, value in params_of(optimizer).items()}
    return {**params, **state_of(optimizer), **settings_of(optimizer)}


def layout(values: Mapping[str, Any]) -> dict[str, str]:
    """Return shape and dtype of every tensor and the type of everything else.

    Args:
        values: what :func:`state_of` returned.
    """
    return {
        key: f"{value.dtype} {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for key, value in values.items()
    }


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are the same, bit by bit where they are tensors (so a NaN equals itself).

    Args:
        left: one value.
        right: the other.

    Example:
        >>> same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
        True
    """
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return type(left) is type(right) and bool(left == right)
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    bits = _BITS[left.element_size()]
    return torch.equal(left.contiguous().view(bits), right.contiguous().view(bits))


def differences(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """Return the keys under which two snapshots differ, in the order of the first.

    Args:
        left: one snapshot.
        right: the other.
    """
    missing = object()
    return [
        key for key in {**left, **right} if not same_bits(left.get(key, missing), right.get(key, missing))
    ]
