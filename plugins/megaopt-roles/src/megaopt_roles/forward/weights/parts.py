"""Parts of weights that are used by hand: what indexing and cutting leave of their axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Axis, Flow, Weight, deps_of

__all__ = ["cut_weight", "index_weight", "taken", "widened"]


def widened(weight: Weight, rank: int) -> Weight:
    """Return a weight expanded to more dimensions."""
    if weight.shape is None or weight.axes is None:
        return weight
    added = max(rank - len(weight.shape), 0)
    return evolve(weight, shape=(1,) * added + weight.shape, axes=(Axis(-1),) * added + weight.axes)


def cut_weight(
    trace: Trace, name: str, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any]:
    """Return the parts that `chunk`, `split` or `unbind` cut a weight into."""
    keywords = {**kwargs}
    at = 0 if name == "unbind" else 1  # the others say first into how many, or how large
    dim = keywords.pop("dim", args[at] if len(args) > at else 0)
    shape: tuple[int, ...] = weight.shape or ()
    dim %= len(shape)
    if name == "unbind":
        return [taken(weight, dim, None) for _ in range(shape[dim])]
    positions = torch.arange(shape[dim], device="cpu")
    first = args[0] if args else next(iter(keywords.values()))
    return [taken(weight, dim, tuple(part.tolist()), trace) for part in getattr(positions, name)(first)]


def taken(weight: Weight, dim: int, rows: tuple[int, ...] | None, trace: Trace | None = None) -> Weight:
    """Return a weight without one axis (`rows` None), or with part of it."""
    shape, axes = list(weight.shape or ()), list(weight.axes or ())
    if rows is None:
        del shape[dim], axes[dim]
    else:
        stored = axes[dim]
        shape[dim] = len(rows)
        if trace is not None and stored.index >= 0 and stored.rows is None:
            cut = _stored_rows(weight, dim, rows)
            if cut:
                trace.cut(weight.base, stored.index, cut)
        axes[dim] = Axis(stored.index, rows, stored.block)
    return evolve(weight, shape=tuple(shape), axes=tuple(axes))


def _stored_rows(weight: Weight, dim: int, rows: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of the stored axis that are left where one axis keeps some; nothing where it is not whole.

    Of an axis that was reshaped to `[blocks, block]` these are the same rows of every block.
    """
    shape, axes = weight.shape or (), weight.axes or ()
    size, block = weight.base.shape[axes[dim].index], axes[dim].block
    if block is None:
        return rows if size == shape[dim] else ()
    outer = axes[dim - 1] if dim else None
    whole = outer == Axis(axes[dim].index) and shape[dim - 1] * block == size and shape[dim] == block
    return tuple(start + row for start in range(0, size, block) for row in rows) if whole else ()


def _index_lost(trace: Trace, weight: Weight, keys: list[Any]) -> Any:
    """Return a part of a weight whose axes are not known any more."""
    given = deps_of(keys)
    if any(isinstance(key, Flow | int) for key in keys):
        trace.use(weight, Use("indexed" if given else "looked_up"))
    return trace.picked(weight, given) if given and weight.right else weight


def index_weight(trace: Trace, weight: Weight, keys: list[Any]) -> Any:
    """Return `weight[keys]`."""
    if weight.shape is None or weight.axes is None:
        return _index_lost(trace, weight, keys)
    keys = _cropped(trace, weight, _spelled_out(keys, len(weight.shape)))
    if len(keys) == len(weight.shape) > 1 and all(isinstance(key, Flow) for key in keys):
        trace.use(weight, Use("elementwise"))  # single elements, not rows
        return Flow(deps_of(keys) | weight.deps)
    result, dim = weight, 0
    for key in keys:
        shape = result.shape or ()
        if key is None:
            result = _inserted(result, dim)
            dim += 1
        elif dim >= len(shape):
            break
        elif isinstance(key, slice):
            result, dim = _slice(trace, result, dim, key), dim + 1
        elif isinstance(key, int):
            trace.use(weight, Use("looked_up"))
            result = taken(result, dim, None)
        else:
            # Rows of a table may have been made matrices: experts, say.
            block = len(shape) > max(weight.base.dim(), 2)
            trace.use(weight, Use("indexed" if deps_of(key) and dim == 0 and not block else "looked_up"))
            _look_up_mixers(trace, result, dim, key)
            result = taken(result, dim, None)
    if any(isinstance(key, Flow | Weight) for key in keys):
        left = {axis.index for axis in result.axes or ()} - {-1}
        if len(left) < 2 and deps_of(keys):
            width = result.shape[0] if len(result.shape or ()) == 1 else None  # type: ignore[index]
            return trace.picked(result, deps_of(keys), width)  # rows of a table: an activation from here on
        result = evolve(result, deps=result.deps | deps_of(keys))
    return result


def _look_up_mixers(trace: Trace, weight: Weight, dim: int, key: Any) -> None:
    """Note the coefficients of a mixture of which some matrices are asked for by an index that is given."""
    counted = (weight.axes or ())[dim].index
    for index, mixer in weight.mixers if deps_of(key) else ():
        if index == counted:
            trace.use(mixer, Use("indexed"))


def _spelled_out(keys: list[Any], rank: int) -> list[Any]:
    """Return the keys with a slice for every axis that an ellipsis stands for."""
    position = next((i for i, key in enumerate(keys) if key is Ellipsis), None)
    if position is None:
        return keys
    named = sum(1 for key in keys if key is not None and key is not Ellipsis)
    return [*keys[:position], *[slice(None)] * (rank - named), *keys[position + 1 :]]


def _slice(trace: Trace, weight: Weight, dim: int, key: slice) -> Weight:
    if key == slice(None):
        return weight
    if _is_open(key):
        trace.use(weight, Use("sliced"))
        return weight
    try:
        rows = tuple(range((weight.shape or ())[dim])[key])
    except TypeError:
        return weight
    return weight if len(rows) == (weight.shape or ())[dim] else taken(weight, dim, rows, trace)


def _cropped(trace: Trace, weight: Weight, keys: list[Any]) -> list[Any]:
    """Return keys without slices of unknown length where there are several: a square as large as the input is long."""
    several = [i for i, key in enumerate(keys) if _is_open(key)]
    if len(several) < 2 or None in keys or len(keys) != len(weight.axes or ()):
        return keys
    trace.use(weight, Use("cropped", tuple((weight.axes or ())[i].index for i in several)))
    return [slice(None) if i in several else key for i, key in enumerate(keys)]


def _is_open(key: Any) -> bool:
    """True for a slice whose ends are not known."""
    return isinstance(key, slice) and any(isinstance(part, Flow) for part in (key.start, key.stop, key.step))


def _inserted(weight: Weight, dim: int) -> Weight:
    shape, axes = list(weight.shape or ()), list(weight.axes or ())
    shape.insert(dim, 1)
    axes.insert(dim, Axis(-1))
    return evolve(weight, shape=tuple(shape), axes=tuple(axes))
