"""Which axes of a weight a product sums over, and which of its rows are picked instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaopt_roles.forward.rows import lies_along
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight
from megaopt_roles.forward.weights.forms import without_axes
from megaopt_roles.forward.weights.mixtures import note_mixture

__all__ = [
    "choose",
    "chosen_rows",
    "contract",
    "is_fixed",
    "lookup",
    "note_positions",
    "somehow",
    "sum_of_products",
    "sum_over",
]


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
        note_mixture(trace, weight, *((axis,) for axis in range(weight.base.dim())))
        trace.use(weight, Use("contracted"))
        return weight.base.dim() > 1
    into, out = (
        tuple(sorted(set[int]().union(*(weight.axes[i].indices for i in positions))))
        for positions in (inputs, outputs)
    )
    if len(into) > 1:  # of a mixture: the sum goes over its matrices, too
        into = tuple(axis for axis in into if axis not in dict(weight.mixers))
    if not into or not out:
        return False
    if note_mixture(trace, weight, into, out):
        return True
    blocks = [weight.axes[i].block for i in (*inputs, *outputs) if weight.axes[i].block is not None]
    rest = set(range(weight.base.dim())) - set(into) - set(out)
    trace.use(weight, Use("contracted", into, out, tuple(sorted(rest)), blocks[0] if blocks else None))
    return True


def note_positions(
    trace: Trace, weight: Weight, activation: Any, axes: Sequence[int], *, unless_known: bool
) -> None:
    """Note a weight which something fixed multiplies, entry by entry, where a product with it sums over positions.

    It may scale the edges of a graph, or be the rows of a matrix under a mask.

    Args:
        trace: where it is noted.
        weight: the weight.
        activation: what it is multiplied with.
        axes: of the activation, which the product sums over.
        unless_known: these are positions where it is not known along which axis of the activation its features lie.
    """
    if not trace.masked.issuperset(map(id, weight.params)) or not isinstance(activation, Flow):
        return
    known = activation.piece is not None and activation.tensor is not None
    if not all(lies_along(activation, axis) for axis in axes) if known else unless_known:
        trace.use(weight, Use("masked"))


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


def somehow(trace: Trace, weight: Weight, other: Any) -> Flow:
    """Return a product with a weight, over axes that are not known."""
    trace.use(weight, Use("contracted"))
    return Flow(trace.weigh(weight, other))


def sum_over(trace: Trace, weight: Weight, inputs: Sequence[int] | None, other: Any) -> Any:
    """Return a product of a weight with something else that sums over some of its axes (None: not known which)."""
    if isinstance(other, Flow) and other.one_hot:
        return chosen_rows(trace, weight, other)
    if is_fixed(other):
        return lookup(trace, weight)
    choose(trace, weight, other, inputs or ())
    if inputs is None or weight.shape is None:
        return somehow(trace, weight, other)
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
    elif stored == {0}:
        trace.use(weight, Use("blended"))
    trace.choose(other, stacks=among and weight.base.dim() > 2)


def chosen_rows(trace: Trace, weight: Weight, codes: Flow) -> Flow:
    """Return the rows of a weight that one-hot codes choose: codes of what is given, or of something fixed."""
    trace.use(weight, Use("indexed" if codes.deps else "looked_up"))
    return trace.picked(weight, codes.deps)


def is_fixed(other: Any) -> bool:
    """True for an operand that no activation went into: a buffer, a matrix of an interpolation."""
    return isinstance(other, Flow) and not other.deps and not other.zero


def lookup(trace: Trace, weight: Weight) -> Weight:
    """Return the product of a weight with something fixed: still a table, in another form."""
    trace.use(weight, Use("fixed"))
    return without_axes(weight)
