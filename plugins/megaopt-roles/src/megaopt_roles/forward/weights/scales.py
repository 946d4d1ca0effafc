"""What is done to weights entry by entry: sums, masks, scales."""

from __future__ import annotations

import math

from attrs import evolve

from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Weight
from megaopt_roles.forward.weights.forms import together
from megaopt_roles.forward.weights.noise import spread

__all__ = ["add", "combine", "scale", "with_fixed"]


def combine(first: Weight, second: Weight) -> Weight:
    """Return what an element-wise operation makes of two weights.

    The axes are those of the larger one; of two alike, of one whose axes are known.
    """
    sizes = [
        (0 if weight.shape is None else math.prod(weight.shape), weight.axes is not None)
        for weight in (first, second)
    ]
    large = first if sizes[0] >= sizes[1] else second
    both = together((large, second if large is first else first))
    return evolve(both, deps=first.deps | second.deps)


def add(trace: Trace, first: Weight, second: Weight) -> Weight:
    """Return the sum of two weights; one that something fixed multiplies, entry by entry, is a scale: of noise, say."""
    for one, other in ((first, second), (second, first)):
        moved = spread(trace, one, other)
        if moved is not None:
            return moved
        fixed = all(id(param) in trace.masked for param in one.params)
        if fixed and not any(id(param) in trace.masked for param in other.params):
            trace.use(one, Use("elementwise"))
        scaled = any(Use("grouped") in trace.uses.get(id(param), ()) for param in other.params)
        if (scaled or not other.base.requires_grad) and _is_repeated(one.shape, other.shape):
            trace.use(one, Use("grouped"))
    return combine(first, second)


def with_fixed(trace: Trace, symbol: str, weight: Weight, shape: tuple[int, ...] | None) -> Weight:
    """Return a weight with which something was done that does not train: a mask, codes of numbers.

    Args:
        trace: where it is noted.
        symbol: what was done, as `arithmetic` has it.
        weight: the weight.
        shape: of what does not train; None where that is not known.
    """
    if symbol == "*" and shape is not None and shape == weight.shape:
        trace.masked.update(map(id, weight.params))
    if symbol in ("*", "+", "-") and _is_repeated(weight.shape, shape):
        trace.use(weight, Use("grouped"))
        return evolve(weight, shape=shape, axes=None)
    return weight


def _is_repeated(small: tuple[int, ...] | None, large: tuple[int, ...] | None) -> bool:
    """True for a shape each of whose entries belongs to a group of the entries of another one, inside of it.

    What is repeated as a whole, along a first axis of one, is no such shape.

    Args:
        small: the one; its axes of several entries are all in the other one.
        large: the other.
    """
    if small is None or large is None or not len(large) >= len(small) > 1:
        return False
    pairs = [*zip(small, large[len(large) - len(small) :], strict=True)]
    more = [at for at, (one, other) in enumerate(pairs) if one < other]
    fits = all(other % max(one, 1) == 0 for one, other in pairs)
    return bool(more) and fits and small[more[0]] > (1 if more[0] == 0 else 0) and max(small) > 1


def scale(trace: Trace, first: Weight, second: Weight) -> Weight:
    """Return the product of two weights, element by element: the smaller one scales the larger one."""
    sizes = [None if weight.shape is None else math.prod(weight.shape) for weight in (first, second)]
    if None in sizes or sizes[0] == sizes[1]:
        _note_scales(trace, first, second)
        return combine(first, second)
    large, small = (first, second) if sizes[0] > sizes[1] else (second, first)  # type: ignore[operator]
    own = tuple(param for param in small.params if not any(param is other for other in large.params))
    trace.use(evolve(small, params=own), Use("elementwise"))
    return evolve(large, deps=first.deps | second.deps)


def _note_scales(trace: Trace, first: Weight, second: Weight) -> None:
    """Note that each of two whole matrices scales the other, entry by entry; what does not train is a mask."""
    whole = len(first.params) == len(second.params) == 1 and first.base is not second.base
    if whole and first.shape == second.shape:
        fixed = [weight for weight in (first, second) if not weight.base.requires_grad]
        trace.use_all(fixed or (first, second), "elementwise")
