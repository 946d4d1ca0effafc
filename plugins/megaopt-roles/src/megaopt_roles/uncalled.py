"""Layers of a list whose output no source was seen to take, where a loop calls others of the list and goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from megaopt_roles.model.reading import ModelReading

__all__ = ["called_twins"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

type Owner = tuple[str, nn.Module, str]
"""The module that owns a weight: its canonical name, itself, and what it calls the weight."""


def called_twins(
    name: str, layer: nn.Module | nn.Parameter, modules: Mapping[str, nn.Module], reading: ModelReading
) -> list[tuple[nn.Parameter, Owner]]:
    """Return what stands for a layer in other items of its list, which one place in a source calls.

    The loop around that place goes as far as an input is long, of which the size is a guess; or it ends with the layer,
    and nothing takes what its last round makes, as what the last of many residual blocks would hand on.

    Args:
        name: canonical name of the layer.
        layer: the projection, or the weight that is used by hand.
        modules: every module by canonical name.
        reading: what their sources say.

    Returns:
        Weights with their owners, of the same class and shape; nothing where fewer than two others are called in one
        place, or, where the item that holds the layer is called, where no layer takes what the others make there.
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        holder = modules.get(".".join(parts[:at]))
        if not isinstance(holder, _LISTS):
            continue
        items = {**holder._modules, **holder._parameters}
        own = items.get(parts[at])
        if own is None:
            continue
        called, places = set(_places(own, reading)), Counter[Any]()
        found: list[tuple[nn.Parameter, Owner]] = []
        for other, item in items.items():
            twin_name = ".".join([*parts[:at], other, *parts[at + 1 :]])
            twin = _named(twin_name, modules)
            if item is None or twin is None or item is own or not _is_alike(twin, layer):
                continue
            elsewhere = set(_places(item, reading))
            places.update(elsewhere)
            if elsewhere & called and id(twin) in reading.surely_consumed if called else elsewhere:
                found.append(_owned(twin_name, twin, modules))
        if found and (called or max(places.values()) > 1):
            return found
    return []


def _named(name: str, modules: Mapping[str, nn.Module]) -> nn.Module | nn.Parameter | None:
    """Return the module, or the parameter, of a name."""
    holder, _, attribute = name.rpartition(".")
    found = modules.get(name)
    return modules[holder]._parameters.get(attribute) if found is None and holder in modules else found


def _owned(
    name: str, layer: nn.Module | nn.Parameter, modules: Mapping[str, nn.Module]
) -> tuple[nn.Parameter, Owner]:
    if isinstance(layer, nn.Module):
        return layer._parameters["weight"], (name, layer, "weight")  # type: ignore[return-value]
    holder, _, attribute = name.rpartition(".")
    return layer, (holder, modules[holder], attribute)


def _places(item: nn.Module | nn.Parameter, reading: ModelReading) -> Iterator[Any]:
    """Yield where a module or a weight, or something in it, is called by what stands outside of it."""
    inside = {id(item)}
    if isinstance(item, nn.Module):
        inside |= {id(part) for part in (*item.modules(), *item.parameters())}
    for key in inside:
        yield from ((caller, site) for caller, site in reading.places.get(key, ()) if caller not in inside)


def _is_alike(one: nn.Module | nn.Parameter, other: nn.Module | nn.Parameter) -> bool:
    """True for two of one class and shape, of which the first has its weight stored as it is."""
    if type(one) is not type(other) or (isinstance(one, nn.Module) and one._parameters.get("weight") is None):
        return False
    weights = [
        part._parameters.get("weight") if isinstance(part, nn.Module) else part for part in (one, other)
    ]
    shapes = [None if weight is None else weight.shape for weight in weights]
    return shapes[0] == shapes[1]
