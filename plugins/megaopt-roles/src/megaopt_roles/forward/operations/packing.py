"""`pack` and `unpack` of einops: tensors side by side along what a pattern calls `*`, and apart again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.joins import marked
from megaopt_roles.forward.shapes import moves
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, deps_of, shape_of, weights_of

__all__ = ["pack", "unpack"]


def pack(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the packed tensor, and the sizes that its `*` stands for, of each; None for one that is not known.

    Args:
        trace: where uses are noted.
        args: `pack(tensors, pattern)`.
        kwargs: its keyword arguments.
    """
    tensors, pattern = argument(0, "tensors", args, kwargs), argument(1, "pattern", args, kwargs)
    if not isinstance(tensors, list | tuple):
        return [trace.unknown(args, kwargs), Flow()]
    around = _around(pattern)
    inside = [_inside(shape_of(tensor), around) for tensor in tensors]
    if len(tensors) == 1:
        return [_reshaped(trace, tensors[0], inside[0] and (math.prod(inside[0]),), around), inside]
    trace.use_all(weights_of(tensors), "elementwise")
    return [marked(trace.unknown(tensors)), inside]


def unpack(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the tensors that were packed.

    Args:
        trace: where uses are noted.
        args: `unpack(tensor, packed_shapes, pattern)`.
        kwargs: its keyword arguments.
    """
    tensor, pattern = argument(0, "tensor", args, kwargs), argument(2, "pattern", args, kwargs)
    sizes = argument(1, "packed_shapes", args, kwargs)
    if not isinstance(sizes, list):
        return trace.unknown(args, kwargs)
    if len(sizes) == 1:
        return [_reshaped(trace, tensor, sizes[0], _around(pattern))]
    trace.use_all(weights_of(tensor), "elementwise")
    return [Flow(deps_of(tensor)) for _ in sizes]


def _around(pattern: Any) -> tuple[int, int] | None:
    """Return how many axes stand before `*` and behind it."""
    names = pattern.split() if isinstance(pattern, str) else []
    return (names.index("*"), len(names) - names.index("*") - 1) if "*" in names else None


def _inside(shape: tuple[int, ...] | None, around: tuple[int, int] | None) -> tuple[int, ...] | None:
    if shape is None or around is None or len(shape) < sum(around):
        return None
    return shape[around[0] : len(shape) - around[1]]


def _reshaped(
    trace: Trace, tensor: Any, inside: tuple[int, ...] | None, around: tuple[int, int] | None
) -> Any:
    """Return a tensor with other axes in the place of `*`; what was done to it is not known where these are not."""
    shape = shape_of(tensor)
    if shape is None or inside is None or around is None:
        return trace.unknown(tensor) if isinstance(tensor, Flow) else tensor
    sizes = (*shape[: around[0]], *inside, *shape[len(shape) - around[1] :])
    return moves.move(trace, "reshape", (tensor, sizes), {})
