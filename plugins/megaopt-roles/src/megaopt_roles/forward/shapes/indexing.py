"""What an index takes of activations and weights."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from megaopt_roles.forward.dependencies import ARGUMENT, guessed
from megaopt_roles.forward.rows import lies_along, relabel
from megaopt_roles.forward.shapes.moves import of_sum
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of
from megaopt_roles.forward.weights.parts import index_weight

__all__ = ["index", "is_place", "last_size"]


def index(trace: Trace, value: Any, key: Any) -> Any:
    """Return `value[key]`."""
    if isinstance(value, Weight):
        return index_weight(trace, value, list(key) if isinstance(key, tuple) else [key])
    if not isinstance(value, Flow):
        return trace.unknown(value, key)
    if value.changed is not None and is_place(key):
        before, items = value.changed
        if key in items:
            return items[key]
        if all(_are_apart(key, other) for other in items):
            return index(trace, before, key)
    if value.eye and isinstance(key, Flow) and key.deps == {ARGUMENT}:
        return Flow(key.deps, one_hot=True, coded=True)
    if isinstance(key, str):  # numbers pick rows as well, of which all come from everything
        value = evolve(value, deps=guessed(value.deps))
    found = _index_flow(trace, value, key)
    if not isinstance(found, Flow):
        return found
    soft = value.soft and last_size(value) is not None and last_size(found) in (1, last_size(value))
    return evolve(
        found,
        picked=found.picked or bool(deps_of(key)),
        soft=found.soft or soft,
        length=value.length,
        zero=value.zero,
        coded=value.coded and found.one_hot,
    )


def is_place(key: Any) -> bool:
    """True for what names one item: a number, or what counts the items of a loop."""
    return (type(key) is int and key >= 0) or (isinstance(key, Flow) and key.place is not None)


def _are_apart(key: int | Flow, other: int | Flow) -> bool:
    """True for two places that are not the same one: what two loops count may be."""
    if isinstance(key, int) or isinstance(other, int):
        return type(key) is type(other)
    return key.place is other.place


def last_size(flow: Flow) -> int | None:
    """Return the size of the last axis of an activation; None where it is not known, or there is none."""
    return flow.tensor.shape[-1] if flow.tensor is not None and flow.tensor.dim() else None


def _index_flow(trace: Trace, value: Flow, key: Any) -> Any:
    if value.terms:
        return of_sum(value, [index(trace, term, key) for term in value.terms])
    if value.call is not None and value.tensor is None and isinstance(key, int) and key >= 0:
        return value.part(key)
    if value.tensor is None or isinstance(key, str):
        inside = isinstance(key, tuple) and isinstance(key[-1], int) and Ellipsis in key[:-1]  # of each code
        return Flow(value.deps, one_hot=value.one_hot and not inside)
    keys = tuple(
        slice(None) if isinstance(item, Flow) else item
        for item in (key if isinstance(key, tuple) else (key,))
    )
    keys = tuple(_closed(item) for item in keys)
    if value.fresh and len(keys) == 1 and isinstance(keys[0], int):
        return value  # a projection that returns a tuple, or one item of the batch
    try:
        return relabel(value.tensor[keys], value)
    except IndexError:  # beyond the features: these are positions, and the rank is wrong
        beyond = any(isinstance(item, int) and lies_along(value, at) for at, item in enumerate(keys))
        several = sum(item is not None and item is not Ellipsis for item in keys) > value.tensor.dim()
        if beyond or several:
            trace.misfit(value.pieces)
        return Flow(value.deps)
    except Exception:  # noqa: BLE001 - the shape is not what was assumed
        return Flow(value.deps)


def _closed(item: Any) -> Any:
    if isinstance(item, slice):
        parts = [None if isinstance(part, Flow) else part for part in (item.start, item.stop, item.step)]
        return slice(*parts)
    return item
