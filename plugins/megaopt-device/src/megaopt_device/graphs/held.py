"""What a step reads and writes: the memory that a graph is bound to, and the numbers that it would not repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megaopt_core.execution import InnerPart

__all__ = ["addresses", "host_values", "settings_of", "state_kinds", "tensors_in"]

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


def addresses(part: InnerPart, indices: Sequence[int]) -> tuple[int, ...]:
    """Return where pieces lie, what a precision policy keeps of them, and their states.

    Args:
        part: what is stepped.
        indices: positions of the pieces.
    """
    watched = part.precision.watched()
    kept = [tensor for index in indices for tensor in (part.pieces[index].param, *watched[index])]
    states = [tensor for index in indices for tensor in tensors_in(part.inner.state.get(part.stepped[index]))]
    return tuple(tensor.data_ptr() for tensor in (*kept, *states))


def state_kinds(inner: torch.optim.Optimizer) -> list[Any]:
    """Return of what shape and dtype the states are that the groups hold; of nested ones where they lie, too.

    A tensor of the same kind can be copied into the one that was there.

    Args:
        inner: the optimizer.
    """
    found: list[Any] = []
    for group in inner.param_groups:
        for param in group["params"]:
            state = inner.state.get(param) or {}
            for key, value in sorted(state.items(), key=lambda item: str(item[0])):
                if isinstance(value, torch.Tensor):
                    found.append((key, value.shape, value.dtype, value.device))
                else:
                    found.append((key, [tensor.data_ptr() for tensor in tensors_in(value)]))
    return found


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
