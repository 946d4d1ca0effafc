"""Operations that move or cut elements: on activations they run on row numbers, on weights they move axes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import nn

from megaopt_roles.forward.objects import Choice, items_of
from megaopt_roles.forward.rows import lies_along, note_axes, note_heads, relabel
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of
from megaopt_roles.forward.weights.forms import reorder, reshape, without_axes
from megaopt_roles.forward.weights.parts import cut_weight, index_weight, taken, widened

__all__ = ["SHAPE_OPS", "index", "last_size", "move", "unpack"]

_TURNS = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
SHAPE_OPS = frozenset(
    [
        "view",
        "reshape",
        "permute",
        "transpose",
        "swapaxes",
        "swapdims",
        "movedim",
        "moveaxis",
        "flatten",
        "unflatten",
        "squeeze",
        "unsqueeze",
        "chunk",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "narrow",
        "select",
        "expand",
        "expand_as",
        "broadcast_to",
        "repeat",
        "tile",
        "t",
        "repeat_interleave",
        "view_as",
        "reshape_as",
        "ravel",
        "adjoint",
        "rearrange",
        "glu",
    ]
)
_SHAPING = frozenset(["view", "reshape", "unflatten", "rearrange"])
_MERGING = frozenset(["view", "reshape", "flatten", "rearrange", "ravel"])
_PIECEWISE = frozenset(["chunk", "split", "split_with_sizes", "tensor_split", "unbind"])
_MOST_PARTS = 512
"""Parts that are followed one by one: an axis in more is one of features, which a wrong guess of the shape made."""


def move(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a shape operation makes of its first argument."""
    value = args[0]
    if isinstance(value, Weight):
        move_weight = _rearranged if name == "rearrange" else _move_weight
        return move_weight(trace, name, value, args[1:], kwargs)
    if isinstance(value, Flow) and value.terms:
        return _together(value, [move(trace, name, [term, *args[1:]], kwargs) for term in value.terms])
    if not isinstance(value, Flow) or value.tensor is None:
        return _many(name, _of_no_shape(trace, name, args, kwargs), args, kwargs)
    arguments = [_size(arg, value) for arg in _together_if_unknown(name, _plain(args[1:]))]
    if name.endswith("_as") and len(args) > 1 and isinstance(args[1], Flow) and args[1].tensor is not None:
        arguments = [args[1].tensor]
    keywords = {key: _size(item, value) for key, item in kwargs.items()}
    try:
        if name == "glu":
            return _glu(trace, value, *arguments, **keywords)
        result = _run(name, value.tensor, arguments, keywords)
    except Exception:  # noqa: BLE001 - whatever the operation says, the shape is not what was assumed
        trace.failed |= name == "unflatten" and value.piece is not None
        return _many(name, trace.unknown(value), args, kwargs)
    if isinstance(result, torch.Tensor):
        if name in _SHAPING:
            note_heads(value, result)
        else:
            note_axes(value, result)
        return evolve(relabel(result, value), reshaped=name in _MERGING)
    if len(result) > _MOST_PARTS:
        return _many(name, trace.unknown(value), args, kwargs)
    parts = [relabel(part, value) for part in result]
    _note_repeated(trace, parts)
    at = 0 if name == "unbind" else 1  # the others say first into how many, or how large
    trace.part(value, parts, kwargs.get("dim", args[at + 1] if len(args) > at + 1 else 0))
    return parts


def _note_repeated(trace: Trace, parts: Sequence[Flow]) -> None:
    """Note a cut through positions, too, that a new shape laid in one axis with features: the rank is wrong then."""
    pieces = [part.piece for part in parts if part.piece is not None and part.piece.parent is not None]
    if len({id(piece) for piece in pieces}) < len(pieces):
        trace.misfits.update(id(piece.source.owner) for piece in pieces)


def _of_no_shape(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what becomes of an activation of unknown shape; one-hot codes stay codes, along any axis."""
    made = trace.unknown(*args, *kwargs.values())
    if not (isinstance(args[0], Flow) and args[0].one_hot):
        return made
    return evolve(made, one_hot=True, coded=args[0].coded and name in _TURNS)


def _together(value: Flow, results: list[Any]) -> Any:
    """Return what an operation makes of a sum, from what it makes of each term."""
    first = results[0]
    if isinstance(first, list):
        return [_together(value, list(parts)) for parts in zip(*results, strict=False)]
    flows = [result for result in results if isinstance(result, Flow)]
    shape = next((flow.tensor.to("meta") for flow in flows if flow.tensor is not None), None)
    pieces = tuple(piece for flow in flows for piece in flow.pieces)
    return Flow(value.deps, shape, mixed=pieces, terms=tuple(flows))


def _run(name: str, tensor: torch.Tensor, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if name == "rearrange":
        from einops import rearrange  # type: ignore[import-not-found,unused-ignore]

        return rearrange(tensor, *args, **kwargs)
    if name in ("view", "reshape") and len(args) == 1 and isinstance(args[0], list):
        args = [tuple(args[0])]
    if name == "view":
        name = "reshape"
    return getattr(tensor, name)(*args, **kwargs)


def _glu(trace: Trace, value: Flow, dim: int = -1) -> Flow:
    if value.tensor is None:
        return Flow(value.deps)
    first, second = (relabel(part, value) for part in value.tensor.chunk(2, dim))
    trace.multiply(first, second, summed=False)
    return Flow(value.deps, None if first.tensor is None else first.tensor.to("meta"))


def _plain(args: Sequence[Any]) -> list[Any]:
    return [list(arg) if isinstance(arg, torch.Size | tuple | list) else arg for arg in args]


def _together_if_unknown(name: str, args: list[Any]) -> list[Any]:
    """Return the sizes of a new shape as one list where several are not known: their places tell what they are."""
    several = name in ("view", "reshape") and sum(isinstance(arg, Flow) or arg == -1 for arg in args) > 1
    return [args] if several else args


def _size(arg: Any, value: Flow) -> Any:
    """Return an argument with the sizes that are not known taken from the activation, in order."""
    if isinstance(arg, Flow):
        return -1
    if isinstance(arg, list):
        shape = () if value.tensor is None else value.tensor.shape
        if (
            shape and arg[:2] == [-1, 1] and isinstance(arg[-1], Flow)
        ):  # samples, a place for positions, features
            among = math.prod(size for size in arg if isinstance(size, int) and size > 0)
            arg = [*arg[:-1], shape[-1] // among if shape[-1] % among == 0 else arg[-1]]
        return [
            (shape[i] if i < len(shape) - 1 else -1) if isinstance(item, Flow) else item
            for i, item in enumerate(arg)
        ]
    return arg


def _many(name: str, flow: Flow, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that could not be run: as many values as it says that it returns."""
    if name not in _PIECEWISE:
        return flow
    count = args[1] if len(args) > 1 else kwargs.get("chunks", kwargs.get("split_size"))
    if isinstance(count, list | tuple):
        return [flow] * len(count)
    return [flow] * count if name in ("chunk", "tensor_split") and isinstance(count, int) else flow


def _move_weight(trace: Trace, name: str, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    shape, axes = weight.shape, weight.axes
    lost = without_axes(weight)
    if shape is None or axes is None:
        return [lost, lost, lost] if name in _PIECEWISE else lost
    rank = len(shape)
    try:
        if name in ("view", "reshape"):
            return reshape(weight, args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args)
        if name in ("unsqueeze", "squeeze", "flatten", "ravel", "unflatten"):
            sizes = _run(name, torch.empty(shape, device="meta"), _plain(args), kwargs).shape
            return reshape(weight, sizes)
        if name in ("transpose", "swapaxes", "swapdims", "permute", "t", "movedim", "moveaxis", "adjoint"):
            stand_in = torch.empty(tuple(range(2, rank + 2)), device="meta")
            return reorder(weight, [size - 2 for size in _run(name, stand_in, _plain(args), kwargs).shape])
        if name in ("expand", "repeat", "broadcast_to", "tile"):
            sizes = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
            if len(sizes) > rank and name != "repeat_interleave":
                trace.use(weight, Use("expanded"))
            return widened(weight, len(sizes))
        if name in _PIECEWISE:
            return cut_weight(trace, name, weight, args, kwargs)
        if name in ("narrow", "select"):
            return _picked(trace, name, weight, *args, **kwargs)
    except Exception:  # noqa: BLE001 - sizes that are not known; the axes are lost
        return lost
    return weight


def _rearranged(
    trace: Trace, name: str, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]
) -> Weight:
    """Return `einops.rearrange(weight, pattern)`; its axes are lost where the pattern does more than move and merge."""
    try:
        before, after = args[0].split("->")
        names = before.split()
        groups = [group.split() for group in re.findall(r"(?<=\()[^()]*(?=\))|[^\s()]+", after)]
        moved = reorder(weight, [names.index(name) for group in groups for name in group])
        sizes = dict(zip(names, weight.shape or (), strict=True))
        return reshape(moved, [math.prod(sizes[name] for name in group) for group in groups])
    except Exception:  # noqa: BLE001 - any pattern
        return without_axes(weight)


def _picked(
    trace: Trace,
    name: str,
    weight: Weight,
    dim: int,
    start: Any = None,
    length: Any = None,
    index: Any = None,
) -> Any:
    """Return `weight.narrow(dim, start, length)` or `weight.select(dim, index)`."""
    key = start if index is None else index
    if name == "narrow":
        known = isinstance(start, int) and isinstance(length, int)
        key = slice(start, start + length) if known else slice(Flow(), Flow())
    return index_weight(trace, weight, [*[slice(None)] * (dim % len(weight.shape or (0,))), key])


def index(trace: Trace, value: Any, key: Any) -> Any:
    """Return `value[key]`."""
    if isinstance(value, Weight):
        return index_weight(trace, value, list(key) if isinstance(key, tuple) else [key])
    if not isinstance(value, Flow):
        return trace.unknown(value, key)
    found = _index_flow(trace, value, key)
    if not isinstance(found, Flow):
        return found
    soft = value.soft and last_size(value) is not None and last_size(value) == last_size(found)
    return evolve(
        found,
        picked=found.picked or bool(deps_of(key)),
        soft=found.soft or soft,
        length=value.length,
        coded=value.coded and found.one_hot,
    )


def last_size(flow: Flow) -> int | None:
    """Return the size of the last axis of an activation; None where it is not known, or there is none."""
    return flow.tensor.shape[-1] if flow.tensor is not None and flow.tensor.dim() else None


def _index_flow(trace: Trace, value: Flow, key: Any) -> Any:
    if value.terms:
        return _together(value, [index(trace, term, key) for term in value.terms])
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
        trace.misfits.update(id(piece.source.owner) for piece in value.pieces if beyond)
        return Flow(value.deps)
    except Exception:  # noqa: BLE001 - the shape is not what was assumed
        return Flow(value.deps)


def _closed(item: Any) -> Any:
    if isinstance(item, slice):
        parts = [None if isinstance(part, Flow) else part for part in (item.start, item.stop, item.step)]
        return slice(*parts)
    return item


def unpack(trace: Trace, value: Any, count: int, starred: int | None = None) -> list[Any]:
    """Return the parts of a value that is assigned to several names.

    Args:
        trace: where cuts are noted.
        value: what is unpacked.
        count: number of targets.
        starred: position of the starred target, if any.
    """
    if isinstance(value, torch.Size):
        value = list(value)
    if isinstance(value, nn.Module | Choice):
        value = items_of(trace, value)
    if isinstance(value, list | tuple):
        items = list(value)
        trace.count(items, count, starred)
        if starred is not None and len(items) >= count - 1:
            tail = count - 1 - starred
            stop = len(items) - tail
            return [*items[:starred], items[starred:stop], *items[stop:]]
        if len(items) in (1, count):  # one row of a weight stands for all
            return items if len(items) == count else items * count
        return [trace.unknown(value)] * count
    if isinstance(value, Flow) and value.call is not None and value.tensor is None and starred is None:
        return [value.part(i) for i in range(count)]
    if isinstance(value, Flow) and value.fresh:
        return [value, *[Flow(value.deps)] * (count - 1)]  # a projection that returns its bias apart
    if (
        isinstance(value, Flow)
        and value.tensor is not None
        and value.tensor.dim()
        and value.tensor.shape[0] == count
    ):
        parts: Callable[..., Any] = value.tensor.unbind
        return [relabel(part, value) for part in parts(0)]
    if isinstance(value, Weight) and value.shape and value.shape[0] == count and value.axes is not None:
        return [taken(value, 0, None) for _ in range(count)]
    return [trace.unknown(value)] * count
