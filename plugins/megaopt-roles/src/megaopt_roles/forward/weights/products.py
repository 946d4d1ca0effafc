"""Products of activations with weights that are used by hand: `@`, linear layers, convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.trace import BATCH, PLACES, Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of
from megaopt_roles.forward.weights.contractions import (
    choose,
    chosen_rows,
    contract,
    is_fixed,
    lookup,
    note_positions,
    somehow,
)
from megaopt_roles.forward.weights.forms import reorder
from megaopt_roles.forward.weights.parameter_products import product_of_parameters

__all__ = ["convolve", "linear", "product", "samples_apart"]


def product(trace: Trace, left: Any, right: Any) -> Any:
    """Return `left @ right`."""
    left = _as_activation(trace, left)
    left, right = samples_apart(trace, (left, right))
    if isinstance(left, Weight) and isinstance(right, Weight):
        return product_of_parameters(trace, left, right)
    weight, other = (right, left) if isinstance(right, Weight) else (left, right)
    if not isinstance(weight, Weight):
        trace.mix(left, right)
        trace.multiply(left, right)
        _note_moved(trace, right)
        return trace.unknown(left, right)
    rank = len(weight.shape or ())
    choose(trace, weight, other, [rank - 2 if weight is right else rank - 1] if rank > 1 else ())
    if isinstance(other, Flow) and other.one_hot:
        return chosen_rows(trace, weight, other)
    if is_fixed(other):
        return lookup(trace, weight)
    if weight.shape is None:
        return somehow(trace, weight, other)
    return _with_activation(trace, weight, other, on_the_right=weight is right)


def _as_activation(trace: Trace, value: Any) -> Any:
    """Return a vector that activations went into as one of them: it may stand for one, or was scaled by one."""
    if not isinstance(value, Weight) or not value.deps or value.shape is None:
        return value
    vector = sum(size > 1 for size in value.shape) < 2
    return Flow(trace.made(value)) if vector else value


def samples_apart(trace: Trace, operands: Sequence[Any]) -> list[Any]:
    """Return the operands of a product, with weights among them as activations that were repeated for each sample.

    An initial state, or learned queries, meet a weight so. What meets an activation may be a weight itself.

    Args:
        trace: where uses are noted.
        operands: of one product.
    """
    apart = [isinstance(operand, Weight) and operand.repeated for operand in operands]
    if all(apart) or not all(isinstance(operand, Weight) for operand in operands):
        return [*operands]
    return [
        _repeated(trace, operand) if is_data else operand
        for is_data, operand in zip(apart, operands, strict=True)
    ]


def _repeated(trace: Trace, weight: Weight) -> Flow:
    trace.use(weight, Use("elementwise"))
    first, *rest = weight.shape or (1,)
    tensor = torch.empty((BATCH[0] if first == 1 else first, *rest), device="meta") if weight.shape else None
    return Flow(trace.made(weight), tensor, zero=True)


def _with_activation(trace: Trace, weight: Weight, activation: Any, *, on_the_right: bool) -> Flow:
    """Return the product of an activation and a weight, which stands on one side of it."""
    rank = len(weight.shape or ())
    if rank < 2:
        return _row(trace, weight, activation)
    inputs, outputs = (rank - 2, rank - 1) if on_the_right else (rank - 1, rank - 2)
    if not contract(trace, weight, (inputs,), (outputs,)):
        return trace.unknown(weight, activation)
    note_positions(trace, weight, activation, (-1 if on_the_right else -2,), unless_known=not on_the_right)
    if on_the_right:
        trace.expect(activation, (weight.shape or ())[inputs])
        return _rows(trace, activation, weight, outputs, over_rows=True)
    return Flow(trace.weigh(weight, activation, by_row=True))


def _row(trace: Trace, weight: Weight, activation: Any) -> Flow:
    """Return the product of an activation with a vector: a score, of a parameter or of one row of a matrix."""
    trace.use(weight, Use("elementwise" if weight.base.dim() < 2 else "row"))
    deps = deps_of((activation, weight))
    return Flow(frozenset(trace.call(param, deps) for param in weight.params))


def _rows(
    trace: Trace, activation: Any, weight: Weight, axis: int, *, over_rows: bool = False, spatial: int = 0
) -> Flow:
    """Return the product of an activation with a weight, its rows numbered where they can be.

    A convolution over some spatial axes has these behind its rows.
    """
    deps = trace.weigh(weight, activation, over_rows=over_rows)
    if weight.shape is None or weight.axes is None:
        return Flow(deps)
    stored = weight.axes[axis]
    if stored.index < 0 or stored.rows is not None or weight.shape[axis] != weight.base.shape[stored.index]:
        return Flow(deps)
    if spatial:
        return trace.rows_of(weight.base, weight.shape[axis], deps, BATCH[:1], PLACES[:spatial])
    leading = trace.leading(activation, len(weight.shape) if len(weight.shape) > 2 else None)
    return trace.rows_of(weight.base, weight.shape[axis], deps, leading)


def _note_moved(trace: Trace, factor: Any) -> None:
    """Note weights that activations were added to, where a product takes the sum for a weight."""
    if isinstance(factor, Flow):
        trace.use_all(factor.moved, "moved")
        trace.use_all(factor.moved, "carried")


def linear(trace: Trace, activation: Any, weight: Any) -> Any:
    """Return `F.linear(activation, weight)`."""
    activation, weight = samples_apart(trace, (_as_activation(trace, activation), weight))
    if isinstance(weight, Weight) and isinstance(activation, Flow) and activation.one_hot:
        return chosen_rows(trace, weight, activation)
    if isinstance(activation, Weight):
        rank = len(activation.shape or ())
        if isinstance(weight, Weight) and rank == 2 == len(weight.shape or ()):
            return product_of_parameters(trace, activation, reorder(weight, (1, 0)))
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
        return somehow(trace, weight, activation)
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
            return somehow(trace, weight, activation)
        rank = len(weight.shape)
        depthwise = rank > 2 and weight.shape[1] == 1 and groups != 1
        if depthwise or rank < 3:
            trace.use(weight, Use("depthwise"))
            if isinstance(activation, Flow) and activation.piece is not None and weight.shape[0] == groups:
                deps = deps_of((activation, weight))
                return evolve(activation, deps=deps, fresh=False, call=None)  # each channel by itself
        elif transposed:
            contract(trace, weight, (0,), range(1, rank))
            return Flow(trace.weigh(weight, activation))
        else:
            contract(trace, weight, range(1, rank), (0,))
            return _rows(trace, activation, weight, 0, spatial=rank - 2)
    _note_moved(trace, weight)
    return trace.unknown(activation, weight)
