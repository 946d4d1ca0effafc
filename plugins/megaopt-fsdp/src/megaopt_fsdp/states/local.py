"""State of DTensors' local tensors as DTensors."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from megaopt_checkpoint import SlicedTensor

from megaopt_core.params import is_dtensor, local_tensor

__all__ = ["show_parts"]


def show_parts(
    params: Mapping[str, torch.nn.Parameter], states: Mapping[str, MutableMapping[str, Any]]
) -> None:
    """Make states DTensors; where a rank has nothing of a parameter, it has as many of no elements.

    Args:
        params: the parameters by name; those that are no DTensors are left alone.
        states: the state of each; changed in place.
    """
    pairs = [(param, states[name]) for name, param in params.items() if is_dtensor(param)]
    for param, values in pairs:
        for key in values:
            values[key] = _shown(param, values[key])
    every = [{key: value for key, value in values.items() if _is_dtensor(value)} for _, values in pairs]
    like = max(every, key=len, default={})
    for param, values in pairs:
        here = local_tensor(param)
        for key, value in like.items() if here.numel() == 0 else ():
            if key not in values:
                values[key] = _as_dtensor(param, here.new_empty(here.shape, dtype=value.dtype))


def _is_dtensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and is_dtensor(value)


def _shown(param: torch.nn.Parameter, value: Any) -> Any:
    """Return a state that has an element for each of a DTensor's local tensor as a DTensor, anything else as it is."""
    here = local_tensor(param)
    if isinstance(value, SlicedTensor):
        is_one_box = [chunk.sizes for chunk in value.chunks] == [tuple(here.shape)]
        return _as_dtensor(param, value.local(0)) if is_one_box else value
    is_empty = isinstance(value, torch.Tensor) and value.ndim > 0 and here.numel() == value.numel() == 0
    return _as_dtensor(param, value) if is_empty else value


def _as_dtensor(param: torch.nn.Parameter, elements: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a state as part of a DTensor that is cut like the parameter, sharing memory."""
    from torch.distributed.tensor import DTensor

    like: Any = param
    return DTensor.from_local(
        elements.view(local_tensor(param).shape),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
