"""Weights that are used by hand: which of their axes a product sums over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megaopt_core.params.role_rules.forward.trace import BATCH, Trace
from megaopt_core.params.role_rules.forward.values import Axis, Flow, Use, Weight, deps_of

__all__ = ["combine", "contract", "einsum", "product", "reorder", "reshape", "whole_weight"]


def whole_weight(*params: torch.nn.Parameter, shape: Sequence[int] | None = None) -> Weight:
    """Return a parameter as it is stored."""
    base = params[0]
    sizes = tuple(base.shape if shape is None else shape)
    return Weight(params, sizes, tuple(Axis(index) for index in range(len(sizes))), base)


def reorder(weight: Weight, order: Sequence[int]) -> Weight:
    """Return a weight with its axes in another order."""
    if weight.shape is None or weight.axes is None:
        return weight
    shape, axes = (tuple(items[i] for i in order) for items in (weight.shape, weight.axes))
    return Weight(weight.params, shape, axes, weight.base, weight.deps)  # type: ignore[arg-type]


def reshape(weight: Weight, sizes: Sequence[Any]) -> Weight:
    """Return a weight in another shape, following each axis as far as it stays recognizable."""
    lost = Weight(weight.params, None, None, weight.base, weight.deps)
    if weight.shape is None or weight.axes is None or not all(isinstance(size, int) for size in sizes):
        return lost
    known = math.prod(size for size in sizes if size != -1)
    shape = tuple(math.prod(weight.shape) // max(known, 1) if size == -1 else size for size in sizes)
    if math.prod(shape) != math.prod(weight.shape):
        return lost
    axes: list[Axis] = []
    old = [(size, axis) for size, axis in zip(weight.shape, weight.axes, strict=True) if size != 1]
    new = list(shape)
    position = 0
    while position < len(new):
        if new[position] == 1:
            axes.append(Axis(-1))
            position += 1
            continue
        if not old:
            return lost
        size, axis = old.pop(0)
        group = 1
        count = position
        while group < size and count < len(new):
            group *= new[count]
            count += 1
        if group == size:  # one axis kept, or cut into several
            inside = [Axis(axis.index, None, new[count - 1])] if count - position == 2 else []
            if count - position == 1:
                axes.append(axis)
            else:
                axes.extend([*(Axis(axis.index) for _ in range(count - position - len(inside))), *inside])
            position = count
            continue
        while size < new[position] and old:  # several axes become one
            size *= old.pop(0)[0]
        if size != new[position]:
            return lost
        axes.append(axis)
        position += 1
    return Weight(weight.params, shape, tuple(axes), weight.base, weight.deps)


def combine(first: Weight, second: Weight) -> Weight:
    """Return what an element-wise operation makes of two weights: the axes are those of the larger one."""
    sizes = [0 if weight.shape is None else math.prod(weight.shape) for weight in (first, second)]
    large = first if sizes[0] >= sizes[1] else second
    params = tuple({id(param): param for param in (*first.params, *second.params)}.values())
    return Weight(params, large.shape, large.axes, large.base, first.deps | second.deps)


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
        trace.use(weight, Use("contracted"))
        return weight.base.dim() > 1
    into, out = (
        tuple(sorted({weight.axes[i].index for i in positions} - {-1})) for positions in (inputs, outputs)
    )
    if not into or not out:
        return False
    blocks = [weight.axes[i].block for i in (*inputs, *outputs) if weight.axes[i].block is not None]
    rest = set(range(weight.base.dim())) - set(into) - set(out)
    trace.use(weight, Use("contracted", into, out, tuple(sorted(rest)), blocks[0] if blocks else None))
    return True


def product(trace: Trace, left: Any, right: Any) -> Any:
    """Return `left @ right`."""
    if isinstance(left, Weight) and isinstance(right, Weight):
        trace.use_all((left, right), "factor")
        rank = max(len(left.shape or ()), len(right.shape or ()))
        if left.shape is None or right.shape is None or rank != 2 or len(left.shape) != len(right.shape):
            return combine(left, right)
        params = tuple({id(param): param for param in (*left.params, *right.params)}.values())
        return Weight(params, (left.shape[0], right.shape[1]), (Axis(0), Axis(1)), left.base)
    if isinstance(left, Flow) and left.one_hot and isinstance(right, Weight):
        trace.use(right, Use("indexed"))
        return Flow(left.deps)
    if isinstance(right, Weight):
        rank = len(right.shape or ())
        if rank < 2:
            trace.use(right, Use("elementwise"))
            return trace.unknown(left, right)
        if not contract(trace, right, (rank - 2,), (rank - 1,)):
            return trace.unknown(left, right)
        return _rows(trace, left, right, rank - 1)
    if isinstance(left, Weight):
        rank = len(left.shape or ())
        if rank < 2:
            trace.use(left, Use("elementwise"))
        elif contract(trace, left, (rank - 1,), (rank - 2,)):
            return Flow(trace.weigh(left, right))
    return trace.unknown(left, right)


def _rows(trace: Trace, activation: Any, weight: Weight, axis: int) -> Flow:
    """Return the product of an activation with a weight, its rows numbered where they can be."""
    deps = trace.weigh(weight, activation)
    if weight.shape is None or weight.axes is None:
        return Flow(deps)
    stored = weight.axes[axis]
    if stored.index < 0 or stored.rows is not None or weight.shape[axis] != weight.base.shape[stored.index]:
        return Flow(deps)
    leading = trace.leading(activation, len(weight.shape) if len(weight.shape) > 2 else None)
    return trace.rows_of(weight.base, weight.shape[axis], deps, leading)


def linear(trace: Trace, activation: Any, weight: Any) -> Flow:
    """Return `F.linear(activation, weight)`."""
    if isinstance(weight, Weight) and isinstance(activation, Flow) and activation.one_hot:
        trace.use(weight, Use("indexed"))
        return Flow(activation.deps)
    if isinstance(activation, Weight):
        rank = len(activation.shape or ())
        if isinstance(weight, Weight) and rank == 2:
            result = product(trace, activation, reorder(weight, (1, 0)))
            return result if isinstance(result, Flow) else Flow(deps_of(result))
        trace.use(activation, Use("elementwise"))
    if not isinstance(weight, Weight):
        return trace.unknown(activation, weight)
    rank = len(weight.shape or ())
    if rank < 2:
        trace.use(weight, Use("elementwise"))
        return trace.unknown(activation, weight)
    if not contract(trace, weight, (rank - 1,), (rank - 2,)):
        return trace.unknown(activation, weight)
    return _rows(trace, activation, weight, rank - 2)


def convolve(trace: Trace, activation: Any, weight: Any, groups: Any, *, transposed: bool) -> Flow:
    """Return a convolution with a weight that is used by hand."""
    if isinstance(activation, Weight):
        trace.use(activation, Use("elementwise"))
    if isinstance(weight, Weight):
        rank = len(weight.shape or ())
        depthwise = weight.shape is not None and rank > 2 and weight.shape[1] == 1 and groups != 1
        if depthwise or rank < 3:
            trace.use(weight, Use("depthwise"))
        elif transposed:
            contract(trace, weight, (0,), range(1, rank))
            return Flow(trace.weigh(weight, activation))
        else:
            contract(trace, weight, range(1, rank), (0,))
            return Flow(trace.weigh(weight, activation))
    return trace.unknown(activation, weight)


def einsum(trace: Trace, equation: Any, operands: Sequence[Any]) -> Flow:
    """Return `torch.einsum(equation, *operands)`."""
    deps = deps_of(operands)
    terms, result = _subscripts(equation, len(operands))
    for position, operand in enumerate(operands):
        if not isinstance(operand, Weight):
            continue
        if terms is None:
            trace.use(operand, Use("contracted"))
            continue
        term = terms[position]
        others = set("".join(terms[:position] + terms[position + 1 :]))
        if operand.shape is None or len(term) != len(operand.shape):
            several = operand.axes is not None and len({axis.index for axis in operand.axes} - {-1}) < 2
            trace.use(operand, Use("elementwise" if several or not set(term) - set(result) else "contracted"))
            continue
        into = [i for i, letter in enumerate(term) if letter in others and letter not in result]
        out = [i for i, letter in enumerate(term) if letter not in others and letter in result]
        if not into:
            trace.use(operand, Use("elementwise"))
            continue
        if not contract(trace, operand, into, out):
            continue
        deps = trace.weigh(operand, Flow(deps))
        if len(out) == 1 and operand.axes is not None and operand.axes[out[0]].rows is None:
            index = result.index(term[out[0]])
            sizes = [*BATCH, 4, 6, 7][: len(result) - 1]
            if operand.axes[out[0]].index >= 0 and len(sizes) == len(result) - 1:
                rows = operand.shape[out[0]]
                return trace.rows_of(operand.base, rows, deps, tuple(sizes[:index]), tuple(sizes[index:]))
    return Flow(deps)


def _subscripts(equation: Any, count: int) -> tuple[list[str] | None, str]:
    if not isinstance(equation, str):
        return None, ""
    equation = equation.replace(" ", "").replace("...", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return (terms if len(terms) == count else None), result
