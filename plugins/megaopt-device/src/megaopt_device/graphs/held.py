"""What a step reads and writes: the memory that a graph is bound to, and the numbers that it would not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["addresses", "host_values", "settings_of", "tensors_in"]

_NUMBERS = (bool, int, float, str, type(None))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested containers.

    Args:
        value: anything.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from tensors_in(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from tensors_in(held)


def addresses(inner: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return where the parameters that the groups hold lie, and their states.

    Args:
        inner: the optimizer.
    """
    params = [param for group in inner.param_groups for param in group["params"]]
    states = [tensor for param in params for tensor in tensors_in(inner.state.get(param))]
    return tuple(tensor.data_ptr() for tensor in (*params, *states))


def settings_of(inner: torch.optim.Optimizer) -> tuple[tuple[tuple[str, Any], ...], ...]:
    """Return the numbers of each group that a graph would hold as they are; the learning rate is a tensor.

    Args:
        inner: the optimizer.
    """
    return tuple(
        tuple((key, value) for key, value in group.items() if key != "lr" and _is_plain(value))
        for group in inner.param_groups
    )


def host_values(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Return, by where they are, numbers that the optimizer keeps on the host, and CPU tensors of one element.

    Args:
        inner: the optimizer.
    """
    found = dict(enumerate_plain(vars(inner), "attribute"))
    for index, group in enumerate(inner.param_groups):
        found.update(enumerate_plain({key: group[key] for key in group if key != "lr"}, f"group {index}"))
        for at, param in enumerate(group["params"]):
            state = inner.state.get(param) or {}
            found.update(enumerate_plain(state, f"state of parameter {at} of group {index}"))
            if param.device.type != "cpu":
                found.update(
                    (f"state of parameter {at} of group {index}: {key}", value.tolist())
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor) and value.device.type == "cpu"
                )
    return found


def enumerate_plain(values: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield plain values by place.

    Args:
        values: key to value.
        where: what holds them.
    """
    yield from ((f"{where}: {key}", value) for key, value in values.items() if _is_plain(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _NUMBERS)
