"""Weights that are used by hand: which of their axes a product sums over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from megaopt_roles.forward.dependencies import Call
from megaopt_roles.forward.mixtures import mixed_flat, note_mixture
from megaopt_roles.forward.noise import spread
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Axis, Flow, Weight, deps_of
from megaopt_roles.forward.weight_forms import reorder, together, without_axes

__all__ = [
    "choose",
    "combine",
    "contract",
    "convolve",
    "factors",
    "is_repeated",
    "linear",
    "lookup",
    "product",
    "scale",
    "sum_over",
    "with_fixed",
]


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
        if (scaled or not other.base.requires_grad) and is_repeated(one.shape, other.shape):
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
    if symbol in ("*", "+", "-") and is_repeated(weight.shape, shape):
        trace.use(weight, Use("grouped"))
        return evolve(weight, shape=shape, axes=None)
    return weight


def is_repeated(small: tuple[int, ...] | None, large: tuple[int, ...] | None) -> bool:
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


def contract(trace: Trace, weight: Weight, inputs: Sequence[int], outputs: Sequence[int]) -> bool:
    """Note that a product sums over some axes of a weight.

    Args:
        trace: where it is noted.
        weight: the operand.
        inputs: positions of the axes that the product sums over.
        outputs: positions of the axes that become features.

    Returns:
        Whether it is the product with a matrix: not with a vector, or with one row of a table.
    """
    if weight.axes is None:
        note_mixture(trace, weight, range(weight.base.dim()))
        trace.use(weight, Use("contracted"))
        return weight.base.dim() > 1
    into, out = (
        tuple(sorted(set[int]().union(*(weight.axes[i].indices for i in positions))))
        for positions in (inputs, outputs)
    )
    if not into or not out:
        return False
    if note_mixture(trace, weight, {*into, *out}):
        return True
    blocks = [weight.axes[i].block for i in (*inputs, *outputs) if weight.axes[i].block is not None]
    rest = set(range(weight.base.dim())) - set(into) - set(out)
    trace.use(weight, Use("contracted", into, out, tuple(sorted(rest)), blocks[0] if blocks else None))
    return True


def sum_of_products(trace: Trace, flow: Flow, dim: Any) -> None:
    """Note a product with a matrix that is written as a multiplication of what has an axis less, and a sum.

    Args:
        trace: where it is noted.
        flow: what was multiplied with a weight.
        dim: what is summed over.
    """
    assert flow.weighed is not None  # noqa: S101 - the caller asks
    weight, before = flow.weighed
    own = weight.shape or ()
    rank = max(len(own), len(before))
    sizes, given = ((1,) * (rank - len(shape)) + tuple(shape) for shape in (own, before))
    summed = {at % rank for at in (dim if isinstance(dim, tuple | list) else (dim,)) if isinstance(at, int)}
    widened = any(size > 1 and given[axis] == 1 for axis, size in enumerate(sizes) if axis not in summed)
    if widened and any(sizes[axis] > 1 and given[axis] > 1 for axis in summed):
        trace.use(weight, Use("contracted"))


def _somehow(trace: Trace, weight: Weight, other: Any) -> Flow:
    """Return a product with a weight, over axes that are not known."""
    trace.use(weight, Use("contracted"))
    return Flow(trace.weigh(weight, other))


def sum_over(trace: Trace, weight: Weight, inputs: Sequence[int] | None, other: Any) -> Any:
    """Return a product of a weight with something else that sums over some of its axes (None: not known which)."""
    if isinstance(other, Flow) and other.one_hot:
        trace.use(weight, Use("indexed" if other.deps else "looked_up"))
        return trace.picked(weight, other.deps)
    if is_fixed(other):
        return lookup(trace, weight)
    if inputs is None or weight.shape is None:
        return _somehow(trace, weight, other)
    outputs = [axis for axis in range(len(weight.shape)) if axis not in inputs]
    if not contract(trace, weight, inputs, outputs):
        trace.use(weight, Use("elementwise"))
        return trace.unknown(weight, other)
    return Flow(trace.weigh(weight, other, over_rows=[*inputs] == [0]))


def choose(trace: Trace, weight: Weight, other: Any, summed: Sequence[int] = ()) -> None:
    """Note that a softmax chooses among the rows of a weight, and that what it was made with chose.

    Args:
        trace: where it is noted.
        weight: the weight.
        other: what it is multiplied with.
        summed: positions of the axes that the product sums over. Along the first axis of a stack it mixes matrices;
            along another one it chooses among the rows of each.
    """
    if not (isinstance(other, Flow) and other.soft):
        return
    stored = set[int]().union(*(weight.axes[i].indices for i in summed)) if weight.axes else set[int]()
    among = bool(stored) and 0 not in stored
    if weight.base.dim() == 2 or among:
        trace.use(weight, Use("attending"))
    trace.choose(other, stacks=among and weight.base.dim() > 2)


def is_fixed(other: Any) -> bool:
    """True for an operand that no activation went into: a buffer, a matrix of an interpolation."""
    return isinstance(other, Flow) and not other.deps and not other.zero


def lookup(trace: Trace, weight: Weight) -> Weight:
    """Return the product of a weight with something fixed: still a table, in another form."""
    trace.use(weight, Use("fixed"))
    return without_axes(weight)


def product(trace: Trace, left: Any, right: Any) -> Any:
    """Return `left @ right`."""
    left = _as_activation(trace, left)
    if isinstance(left, Weight) and isinstance(right, Weight):
        return _of_parameters(trace, left, right)
    weight, other = (right, left) if isinstance(right, Weight) else (left, right)
    if not isinstance(weight, Weight):
        trace.multiply(left, right)
        _note_moved(trace, right)
        return trace.unknown(left, right)
    rank = len(weight.shape or ())
    choose(trace, weight, other, [rank - 2 if weight is right else rank - 1] if rank > 1 else ())
    if isinstance(other, Flow) and other.one_hot:
        trace.use(weight, Use("indexed" if other.deps else "looked_up"))
        return trace.picked(weight, other.deps)
    if is_fixed(other):
        return lookup(trace, weight)
    if weight.shape is None:
        return _somehow(trace, weight, other)
    return _with_activation(trace, weight, other, on_the_right=weight is right)


def _as_activation(trace: Trace, value: Any) -> Any:
    """Return a vector that activations went into as one of them: it may stand for one, or was scaled by one."""
    if not isinstance(value, Weight) or not value.deps or value.shape is None:
        return value
    vector = sum(size > 1 for size in value.shape) < 2
    return Flow(trace.made(value)) if vector else value


def _with_activation(trace: Trace, weight: Weight, activation: Any, *, on_the_right: bool) -> Flow:
    """Return the product of an activation and a weight, which stands on one side of it."""
    rank = len(weight.shape or ())
    if rank < 2:
        return _row(trace, weight, activation)
    inputs, outputs = (rank - 2, rank - 1) if on_the_right else (rank - 1, rank - 2)
    if not contract(trace, weight, (inputs,), (outputs,)):
        return trace.unknown(weight, activation)
    if on_the_right:
        trace.expect(activation, (weight.shape or ())[inputs])
        return _rows(trace, activation, weight, outputs, over_rows=True)
    return Flow(trace.weigh(weight, activation, by_row=True))


def _row(trace: Trace, weight: Weight, activation: Any) -> Flow:
    """Return the product of an activation with a vector: a score, of a parameter or of one row of a matrix."""
    trace.use(weight, Use("elementwise" if weight.base.dim() < 2 else "row"))
    deps = deps_of((activation, weight))
    return Flow(frozenset(trace.call(param, deps) for param in weight.params))


def _of_parameters(trace: Trace, left: Weight, right: Weight) -> Weight:
    """Return the product of two parameters."""
    ranks = len(left.shape or ()), len(right.shape or ())
    if ranks == (1, 2):  # a learned code, and the matrix that makes something of it
        made = tuple(param for param in left.params if trace.is_contracted(param))
        codes = tuple(param for param in left.params if not trace.is_contracted(param))
        trace.use(evolve(left, params=codes), Use("elementwise"))
        contract(trace, right, (0,), (1,))
        shape = None if right.shape is None else right.shape[1:]
        return Weight((*right.params, *made), shape, None, right.base)
    mixed = mixed_flat(trace, left, right)
    if mixed is not None:
        return mixed
    if max(ranks) > 2:  # all axes but the last two count products
        matrices = [tuple(range(rank))[-2:] for rank in ranks]
        factors(trace, ((left, matrices[0]), (right, matrices[1])))
    else:
        trace.use(left, Use("factor"))
        sides = [tuple(sorted(axis.indices)) for axis in right.axes or ()]
        into, out = sides if len(sides) == 2 else ((), ())
        trace.use(right, Use("factor", into, out))
    if ranks[1] != 2 or ranks[0] not in (0, 2):
        return combine(left, right)
    return _table(trace, left, right)


def factors(trace: Trace, operands: Sequence[tuple[Weight, Sequence[int]]]) -> None:
    """Note the factors of a batch of products of parameters alone.

    Args:
        trace: where it is noted.
        operands: each with the positions of its axes that do not count products. Where these are not two axes of the
            stored parameter, it holds a vector for each product, and what they make is a kernel, say.
    """
    for weight, positions in operands:
        stored = set(range(weight.base.dim() - 1))  # one of its axes counts, where they are not known
        if weight.axes is not None:
            stored = set[int]().union(*(weight.axes[i].indices for i in positions))
        known = tuple(stored) if weight.axes is not None else ()
        trace.use(weight, Use("factor") if len(stored) > 1 else Use("generated", known))


def _table(trace: Trace, left: Weight, right: Weight) -> Weight:
    """Return the product of two matrices: it has the rows of the left one, each made by the right one."""
    sizes = None if left.shape is None or right.shape is None else (left.shape[0], right.shape[1])
    axes = None if sizes is None else (Axis(0), Axis(1))
    made = frozenset(left.right) | left.deps
    held = {id(param) for param in left.params}
    calls = tuple(
        Call(param, made, len(trace.calls), tuple(trace.sites))
        for param in right.params
        if id(param) not in held
    )
    both = together((left, right))
    return evolve(both, shape=sizes, axes=axes, deps=left.deps | right.deps, right=(*left.right, *calls))


def _rows(trace: Trace, activation: Any, weight: Weight, axis: int, *, over_rows: bool = False) -> Flow:
    """Return the product of an activation with a weight, its rows numbered where they can be."""
    deps = trace.weigh(weight, activation, over_rows=over_rows)
    if weight.shape is None or weight.axes is None:
        return Flow(deps)
    stored = weight.axes[axis]
    if stored.index < 0 or stored.rows is not None or weight.shape[axis] != weight.base.shape[stored.index]:
        return Flow(deps)
    leading = trace.leading(activation, len(weight.shape) if len(weight.shape) > 2 else None)
    return trace.rows_of(weight.base, weight.shape[axis], deps, leading)


def _note_moved(trace: Trace, factor: Any) -> None:
    """Note weights that activations were added to, where a product takes the sum for a weight."""
    if isinstance(factor, Flow):
        trace.use_all(factor.moved, "moved")


def linear(trace: Trace, activation: Any, weight: Any) -> Any:
    """Return `F.linear(activation, weight)`."""
    activation = _as_activation(trace, activation)
    if isinstance(weight, Weight) and isinstance(activation, Flow) and activation.one_hot:
        trace.use(weight, Use("indexed" if activation.deps else "looked_up"))
        return trace.picked(weight, activation.deps)
    if isinstance(activation, Weight):
        rank = len(activation.shape or ())
        if isinstance(weight, Weight) and rank == 2 == len(weight.shape or ()):
            return _of_parameters(trace, activation, reorder(weight, (1, 0)))
        if isinstance(weight, Weight) and rank == 2:
            trace.use_all((activation, weight), "factor")
            return Flow(activation.deps | weight.deps)
        trace.use(activation, Use("elementwise"))
    if not isinstance(weight, Weight):
        trace.multiply(activation, weight)
        _note_moved(trace, weight)
        return trace.unknown(activation, weight)
    if is_fixed(activation):
        return lookup(trace, weight)
    choose(trace, weight, activation)
    rank = len(weight.shape or ())
    if weight.shape is None:
        return _somehow(trace, weight, activation)
    if rank < 2:
        return _row(trace, weight, activation)
    trace.expect(activation, weight.shape[-1])
    if not contract(trace, weight, (rank - 1,), (rank - 2,)):
        return trace.unknown(activation, weight)
    return _rows(trace, activation, weight, rank - 2)


def convolve(trace: Trace, activation: Any, weight: Any, groups: Any, *, transposed: bool) -> Flow:
    """Return a convolution with a weight that is used by hand."""
    if isinstance(activation, Weight):
        trace.use(activation, Use("elementwise"))
    if isinstance(weight, Weight):
        if weight.shape is None:  # made anew for each of a batch, say
            return _somehow(trace, weight, activation)
        rank = len(weight.shape)
        depthwise = rank > 2 and weight.shape[1] == 1 and groups != 1
        if depthwise or rank < 3:
            trace.use(weight, Use("depthwise"))
        elif transposed:
            contract(trace, weight, (0,), range(1, rank))
            return Flow(trace.weigh(weight, activation))
        else:
            contract(trace, weight, range(1, rank), (0,))
            return Flow(trace.weigh(weight, activation))
    _note_moved(trace, weight)
    return trace.unknown(activation, weight)
