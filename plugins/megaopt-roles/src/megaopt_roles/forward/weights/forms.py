"""Weights in another form: their axes in another order, cut into several, or joined with those of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.dependencies import Call
from megaopt_roles.forward.values import Axis, Weight

__all__ = ["any_of", "join", "reorder", "reshape", "together", "transposed", "whole_weight", "without_axes"]


def whole_weight(*params: torch.nn.Parameter, shape: Sequence[int] | None = None) -> Weight:
    """Return a parameter as it is stored."""
    base = params[0]
    sizes = tuple(base.shape if shape is None else shape)
    return Weight(params, sizes, tuple(Axis(index) for index in range(len(sizes))), base)


def without_axes(weight: Weight) -> Weight:
    """Return a weight of which nobody knows any more where its axes come from."""
    return evolve(weight, shape=None, axes=None)


def reorder(weight: Weight, order: Sequence[int]) -> Weight:
    """Return a weight with its axes in another order."""
    if weight.shape is None or weight.axes is None:
        return weight
    shape, axes = tuple(weight.shape[i] for i in order), tuple(weight.axes[i] for i in order)
    moved = evolve(weight, shape=shape, axes=axes)
    return transposed(moved) if weight.right and tuple(order) == (1, 0) else moved


def reshape(weight: Weight, sizes: Sequence[Any]) -> Weight:
    """Return a weight in another shape, following each axis as far as it stays recognizable."""
    made = _reshaped(weight, sizes)
    kept = _with_own(weight.shape, sizes) if weight.shape and made.axes is None else None
    return made if kept is None else _reshaped(weight, kept)


def _reshaped(weight: Weight, sizes: Sequence[Any]) -> Weight:
    """Return a weight in a shape as it is written; without axes where these do not line up."""
    lost = without_axes(weight)
    if weight.shape is None or weight.axes is None:
        return lost
    sizes = _for_samples(weight.shape, sizes) if weight.deps else sizes
    if not all(isinstance(size, int) for size in sizes):
        return lost
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(math.prod(weight.shape) // max(known, 1) if size == -1 else size for size in sizes)
    if math.prod(shape) != math.prod(weight.shape):
        return lost
    stored = tuple(weight.base.shape)
    old = [(size, axis) for size, axis in zip(weight.shape, weight.axes, strict=True) if size != 1]
    axes: list[Axis] = []
    while len(axes) < len(shape):
        made = [Axis(-1)] if shape[len(axes)] == 1 else _next_axes(old, shape[len(axes) :], stored)
        if not made:
            return lost
        axes.extend(made)
    if shape == stored and all(axis in (Axis(-1), Axis(at)) for at, axis in enumerate(axes)):
        axes = [Axis(at) for at in range(len(shape))]  # as it is stored
    return evolve(weight, shape=shape, axes=tuple(axes))


def _with_own(shape: tuple[int, ...], sizes: Sequence[Any]) -> Sequence[Any] | None:
    """Return a new shape of two axes of which one is -1, and the other an axis that is kept; None for any other.

    An activation is asked for it (`weight.view(x.size(1), -1)`), whose own shape is a guess.

    Args:
        shape: of the weight, which has more axes.
        sizes: the new shape as it is written.
    """
    rest = [type(size) is int and size == -1 for size in sizes]
    if len(shape) < 3 or rest not in ([False, True], [True, False]):
        return None
    return (shape[0], -1) if rest[1] else (-1, shape[-1])


def _for_samples(shape: tuple[int, ...], sizes: Sequence[Any]) -> Sequence[Any]:
    """Return a new shape for the kernels of all samples, of which the weight has one: samples and channels in one axis.

    Neither the number of samples nor that of channels is known to be right: the shape of the input is a guess.

    Args:
        shape: of the weight, which something of each sample scales.
        sizes: the new shape as it is written.
    """
    merged = len(shape) > 3 and len(sizes) == len(shape) - 1 and shape[0] == 1
    if merged and tuple(sizes[2:]) == shape[3:]:
        return shape[1:]
    apart = len(shape) > 2 and len(sizes) == len(shape) + 1
    return (1, *shape) if apart and tuple(sizes[3:]) == shape[2:] else sizes


def _next_axes(old: list[tuple[int, Axis]], new: Sequence[int], stored: Sequence[int]) -> list[Axis]:
    """Take axes from the front of `old` for one or more new ones; nothing when they do not line up."""
    if not old:
        return []
    size, axis = old.pop(0)
    extent, count = 1, 0
    while extent < size and count < len(new):
        extent *= new[count]
        count += 1
    several = [axis.index, *axis.merged]
    if axis.merged and extent == size and min(several) >= 0:
        within = [part for part in new[:count] if part != 1]
        if [stored[index] for index in several] == within:  # apart again
            return [Axis(-1) if part == 1 else Axis(several.pop(0)) for part in new[:count]]
    if extent == size:  # one axis, kept or cut into several; of two, the inner one is a block
        parts = [Axis(axis.index) for _ in range(count)]
        return (
            [axis]
            if count == 1
            else [*parts[:-1], Axis(axis.index, None, new[1]) if count == 2 else parts[-1]]
        )
    merged: list[int] = []
    while size < new[0] and old:  # several axes become one
        more, other = old.pop(0)
        size *= more
        merged.append(other.index)
    return [evolve(axis, merged=tuple(merged))] if size == new[0] else []


def transposed(weight: Weight) -> Weight:
    """Return a product of two parameters whose rows are columns now: the right-hand factor holds them."""
    right = tuple(
        Call(param, frozenset(), call.order) for call in weight.right[:1] for param in weight.holders
    )
    return evolve(weight, right=right)


def together(parts: Sequence[Weight]) -> Weight:
    """Return the first of several weights as if it were made of the parameters of all.

    What holds the rows of one of them does so for all.
    """
    params = tuple({id(param): param for part in parts for param in part.params}.values())
    holders = {id(param) for part in parts for param in part.holders}
    right = {call: None for part in parts for call in part.right if id(call.module) not in holders}
    return evolve(parts[0], params=params, right=tuple(right))


def join(parts: Sequence[Weight], dim: int | None, *, added: bool) -> Weight:
    """Return several weights that are stacked (along a dimension that is added) or laid side by side.

    Args:
        parts: of one base or of several.
        dim: along which; None where that is not known.
        added: they are stacked.
    """
    first = parts[0]
    lost = evolve(together(parts), axes=None, deps=frozenset())
    if dim is None or first.shape is None or first.axes is None:
        return lost
    alike = all(part.axes == first.axes and len(part.shape or ()) == len(first.shape) for part in parts)
    whole = all(axis.rows is None and axis.block is None for axis in first.axes)
    if not (alike and whole):
        return lost
    shape, axes, dim = list(first.shape), list(first.axes), dim % (len(first.shape) + added)
    if added:
        shape.insert(dim, len(parts))
        axes.insert(dim, Axis(-1))
    else:
        shape[dim] = sum((part.shape or ())[dim] for part in parts)
    return evolve(lost, shape=tuple(shape), axes=tuple(axes))


def any_of(weights: Sequence[Any]) -> Any:
    """Return what stands for one of several weights, of which it is not known which."""
    first = weights[0]
    alike = all(
        isinstance(one, Weight) and one.shape == first.shape and one.axes == first.axes for one in weights
    )
    params = {id(param): param for one in weights if alike for param in one.params}
    return evolve(first, params=tuple(params.values())) if alike else first
