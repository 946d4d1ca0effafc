"""Products over axes that are named by number: tensordot, inner, chains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Weight, weights_of
from megaopt_roles.forward.weights import contractions, products, scales
from megaopt_roles.forward.weights.mixtures import mixed_by_einsum

__all__ = ["chain", "inner", "tensordot"]


def tensordot(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.tensordot(a, b, dims)`."""
    operands = [*args, *(kwargs[key] for key in ("a", "b") if key in kwargs)]
    dims = kwargs.get("dims", operands[2] if len(operands) > 2 else 2)
    if len(operands) < 2:
        return trace.unknown(*args)
    found = weights_of(operands[:2])
    if len(found) == 2:
        mixed = mixed_by_einsum(trace, found, ["ab", "bcd"], "acd") if dims in (1, ([1], [0])) else None
        if mixed is not None:
            return mixed
        if dims == 1 or dims in (([1], [0]), [[1], [0]]):
            return products.product(trace, *found)
        trace.use_all(found, "factor")
        return scales.combine(*found)
    for position, operand in enumerate(operands[:2]):
        if isinstance(operand, Weight):
            inputs = _summed(dims, position, len(operand.shape or ()))
            return contractions.sum_over(trace, operand, inputs, operands[1 - position])
    trace.multiply(*operands[:2])
    return trace.unknown(*operands[:2])


def _summed(dims: Any, position: int, rank: int) -> list[int] | None:
    """Return which axes of an operand a tensordot sums over; None where that is not known."""
    if isinstance(dims, int):
        return list(range(dims)) if position else list(range(rank - dims, rank))
    if not isinstance(dims, list | tuple) or len(dims) != 2:
        return None
    own = dims[position]
    own = [own] if isinstance(own, int) else own
    if not isinstance(own, list | tuple) or not rank or not all(isinstance(axis, int) for axis in own):
        return None
    return [axis % rank for axis in own]


def inner(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.inner(a, b)`: a sum over the last axes of both."""
    operands = [*args, *kwargs.values()][:2]
    if len(operands) == 2 and isinstance(operands[0], Weight):
        operands.reverse()
    return products.linear(trace, *operands) if len(operands) == 2 else trace.unknown(*operands)


def chain(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.linalg.multi_dot([a, b, c])`."""
    factors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if not factors:
        return trace.unknown(kwargs)
    return reduce(lambda left, right: products.product(trace, left, right), factors)
