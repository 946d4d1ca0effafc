"""What functions that move or cut elements do to activations: they run on the numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.rows import lies_along, note_axes, note_heads, relabel
from megaopt_roles.forward.shapes.functions import PIECEWISE, plain, run
from megaopt_roles.forward.shapes.weight_moves import move_weight
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, together

__all__ = ["move", "of_sum"]

_TURNS = ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis")
_SHAPING = frozenset(["view", "reshape", "unflatten", "rearrange"])
_MERGING = frozenset(["view", "reshape", "flatten", "rearrange", "ravel"])
_MOST_PARTS = 512
"""Parts that are followed one by one: an axis in more is one of features, which a wrong guess of the shape made."""


def move(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a shape operation makes of its first argument."""
    value = args[0]
    if isinstance(value, Weight):
        return move_weight(trace, name, value, args[1:], kwargs)
    if isinstance(value, Flow) and value.terms:
        return of_sum(value, [move(trace, name, [term, *args[1:]], kwargs) for term in value.terms])
    if not isinstance(value, Flow) or value.tensor is None:
        return _many(name, _of_no_shape(trace, name, args, kwargs), args, kwargs)
    arguments = [_size(arg, value) for arg in _as_list_if_unknown(name, plain(args[1:]))]
    if name.endswith("_as") and len(args) > 1 and isinstance(args[1], Flow) and args[1].tensor is not None:
        arguments = [args[1].tensor]
    keywords = {key: _size(item, value) for key, item in kwargs.items()}
    try:
        if name == "glu":
            return _glu(trace, value, *arguments, **keywords)
        result = run(name, value.tensor, arguments, keywords)
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
    dim = kwargs.get("dim", args[at + 1] if len(args) > at + 1 else 0)
    trace.part(value, parts, dim)
    return parts * 2 if len(parts) == 1 and _is_open(value, dim) else parts


def _is_open(value: Flow, dim: Any) -> bool:
    """True for an axis whose size stands in for that of what is given: it may be cut into more parts than one."""
    rank = 0 if value.tensor is None else value.tensor.dim()
    return isinstance(dim, int) and rank > 1 and dim % rank < rank - 1 and not lies_along(value, dim)


def _note_repeated(trace: Trace, parts: Sequence[Flow]) -> None:
    """Note a cut through positions, too, that a new shape laid in one axis with features: the rank is wrong then."""
    pieces = [part.piece for part in parts if part.piece is not None and part.piece.parent is not None]
    if len({id(piece) for piece in pieces}) < len(pieces):
        trace.misfit(pieces)


def _of_no_shape(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what becomes of an activation of unknown shape; one-hot codes stay codes, along any axis."""
    made = trace.unknown(*args, *kwargs.values())
    if not (isinstance(args[0], Flow) and args[0].one_hot):
        return made
    return evolve(made, one_hot=True, coded=args[0].coded and name in _TURNS)


def of_sum(value: Flow, results: list[Any]) -> Any:
    """Return what an operation makes of a sum, from what it makes of each term."""
    first = results[0]
    if isinstance(first, list):
        return [of_sum(value, list(parts)) for parts in zip(*results, strict=False)]
    return together(value.deps, (result for result in results if isinstance(result, Flow)))


def _glu(trace: Trace, value: Flow, dim: int = -1) -> Flow:
    if value.tensor is None:
        return Flow(value.deps)
    first, second = (relabel(part, value) for part in value.tensor.chunk(2, dim))
    trace.multiply(first, second, summed=False)
    return Flow(value.deps, None if first.tensor is None else first.tensor.to("meta"))


def _as_list_if_unknown(name: str, args: list[Any]) -> list[Any]:
    """Return the sizes of a new shape as one list where several are not known: their places tell what they are."""
    several = name in ("view", "reshape") and sum(isinstance(arg, Flow) or arg == -1 for arg in args) > 1
    return [args] if several else args


def _size(arg: Any, value: Flow) -> Any:
    """Return an argument with the sizes that are not known taken from the activation, in order."""
    if isinstance(arg, Flow):
        return -1
    if isinstance(arg, list):
        shape = () if value.tensor is None else value.tensor.shape
        # samples, a place for positions, features
        if shape and arg[:2] == [-1, 1] and isinstance(arg[-1], Flow):
            among = math.prod(size for size in arg if isinstance(size, int) and size > 0)
            arg = [*arg[:-1], shape[-1] // among if shape[-1] % among == 0 else arg[-1]]
        return [
            (shape[i] if i < len(shape) - 1 else -1) if isinstance(item, Flow) else item
            for i, item in enumerate(arg)
        ]
    return arg


def _many(name: str, flow: Flow, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation that could not be run: as many values as it says that it returns."""
    if name not in PIECEWISE:
        return flow
    count = args[1] if len(args) > 1 else kwargs.get("chunks", kwargs.get("split_size"))
    if isinstance(count, list | tuple):
        return [flow] * len(count)
    return [flow] * count if name in ("chunk", "tensor_split") and isinstance(count, int) else flow
