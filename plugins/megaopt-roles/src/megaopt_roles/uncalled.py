"""Layers of a list that no source was seen to call, where it calls others of the list in a loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from megaopt_roles.model.reading import ModelReading

__all__ = ["called_twins"]


def called_twins(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], reading: ModelReading
) -> list[tuple[str, nn.Module, nn.Parameter]]:
    """Return the layers that stand for one in other items of its list, which one place in a source calls.

    The loop around that place goes as far as an input is long, of which the size is a guess.

    Args:
        name: canonical name of the layer.
        module: the layer.
        modules: every module by canonical name.
        reading: what their sources say.

    Returns:
        Names, modules and weights, of the same class and shape; nothing where the item that holds the layer is called,
        or where fewer than two others are called in one place.
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        holder = modules.get(".".join(parts[:at]))
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            continue
        own = holder._modules.get(parts[at])
        if own is None or any(True for _ in _places(own, reading)):
            continue
        places, found = Counter[Any](), list[tuple[str, nn.Module, nn.Parameter]]()
        for other, item in holder._modules.items():
            twin_name = ".".join([*parts[:at], other, *parts[at + 1 :]])
            twin = modules.get(twin_name)
            weight = None if twin is None else twin._parameters.get("weight")
            if item is None or twin is None or weight is None or not _is_alike(twin, module):
                continue
            called = set(_places(item, reading))
            places.update(called)
            found += [(twin_name, twin, weight)] if called else []
        if max(places.values(), default=0) > 1:
            return found
    return []


def _places(item: nn.Module, reading: ModelReading) -> Iterator[Any]:
    """Yield where a module, or something in it, is called by what stands outside of it."""
    inside = {id(part) for part in item.modules()}
    for key in inside:
        yield from ((caller, site) for caller, site in reading.places.get(key, ()) if caller not in inside)


def _is_alike(one: nn.Module, other: nn.Module) -> bool:
    shapes = [
        None if weight is None else weight.shape
        for weight in (part._parameters.get("weight") for part in (one, other))
    ]
    return type(one) is type(other) and shapes[0] == shapes[1]
