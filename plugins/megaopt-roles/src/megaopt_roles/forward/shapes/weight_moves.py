"""What functions that move or cut elements do to weights: their axes move."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.shapes.functions import PIECEWISE, plain, run
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight
from megaopt_roles.forward.weights.forms import reorder, reshape, without_axes
from megaopt_roles.forward.weights.parts import cut_weight, index_weight, widened

__all__ = ["move_weight"]


def move_weight(trace: Trace, name: str, weight: Weight, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what a function that moves or cuts elements makes of a weight.

    Args:
        trace: where cuts are noted.
        name: of the function.
        weight: its first argument.
        args: the others.
        kwargs: keyword arguments.
    """
    shape, axes = weight.shape, weight.axes
    lost = without_axes(weight)
    if shape is None or axes is None:
        return [lost, lost, lost] if name in PIECEWISE else lost
    if name == "rearrange":
        return _rearranged(weight, args[0] if args else None)
    try:
        if name in ("view", "reshape"):
            return reshape(weight, _written(args))
        if name in ("unsqueeze", "squeeze", "flatten", "ravel", "unflatten"):
            sizes = run(name, torch.empty(shape, device="meta"), plain(args), kwargs).shape
            return reshape(weight, sizes)
        if name in ("transpose", "swapaxes", "swapdims", "permute", "t", "movedim", "moveaxis", "adjoint"):
            stand_in = torch.empty(tuple(range(2, len(shape) + 2)), device="meta")
            return reorder(weight, [size - 2 for size in run(name, stand_in, plain(args), kwargs).shape])
        if name in ("expand", "repeat", "broadcast_to", "tile"):
            return _expanded(trace, weight, _written(args))
        if name in PIECEWISE:
            return cut_weight(trace, name, weight, args, kwargs)
        if name in ("narrow", "select"):
            return _picked(trace, name, weight, *args, **kwargs)
    except Exception:  # noqa: BLE001 - sizes that are not known; the axes are lost
        return lost
    return weight


def _written(args: Sequence[Any]) -> Sequence[Any]:
    """Return the sizes that a method is given, as one argument or as several."""
    sizes: Sequence[Any] = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    return sizes


def _expanded(trace: Trace, weight: Weight, sizes: Sequence[Any]) -> Weight:
    """Return a weight that is repeated along axes, which are added where there are more than it has."""
    if len(sizes) > len(weight.shape or ()):
        trace.use(weight, Use("expanded"))
    wide = widened(weight, len(sizes))
    pairs = zip(wide.shape or (), sizes, strict=False)
    return evolve(wide, repeated=any(own == 1 and size not in (1, -1) for own, size in pairs))


def _rearranged(weight: Weight, pattern: Any) -> Weight:
    """Return `einops.rearrange(weight, pattern)`; its axes are lost where the pattern does more than move and merge."""
    try:
        before, after = pattern.split("->")
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
