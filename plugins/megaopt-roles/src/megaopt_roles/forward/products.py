"""Products in other ways than `@`: tensordot, inner, chains, of parameters alone, the operators of `torch.ops.aten`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from attrs import evolve

from megaopt_roles.forward import shapes, weights
from megaopt_roles.forward.mixtures import mixed_by_einsum
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, weights_of
from megaopt_roles.forward.weight_forms import together

__all__ = ["as_function", "chain", "cut", "inner", "item", "of_parameters", "tensordot"]

_BY_ENTRY = frozenset(["where", "maximum", "minimum", "complex", "polar", "atan2"])
"""Functions of several tensors that go entry by entry."""


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
            return weights.product(trace, *found)
        trace.use_all(found, "factor")
        return weights.combine(*found)
    for position, operand in enumerate(operands[:2]):
        if isinstance(operand, Weight):
            inputs = _summed(dims, position, len(operand.shape or ()))
            return weights.sum_over(trace, operand, inputs, operands[1 - position])
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
    return weights.linear(trace, *operands) if len(operands) == 2 else trace.unknown(*operands)


def of_parameters(trace: Trace, name: str, found: Sequence[Weight]) -> Weight:
    """Return what another function makes of several parameters alone: a Kronecker product, say.

    Args:
        trace: where uses are noted.
        name: of the function.
        found: what it is given, two weights or more.
    """
    if name == "kron":
        trace.use_all(found, "factor")
    both = together(found)
    alike = all((weight.shape, weight.axes) == (both.shape, both.axes) for weight in found)
    return both if alike and name in _BY_ENTRY else evolve(both, shape=None, axes=None)


def chain(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.linalg.multi_dot([a, b, c])`."""
    factors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
    if not factors:
        return trace.unknown(kwargs)
    return reduce(lambda left, right: weights.product(trace, left, right), factors)


def as_function(name: str, args: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return name and arguments of the function of torch that an operator of `torch.ops.aten` is.

    Args:
        name: of the operator, with its overload.
        args: positional arguments.
    """
    name, values = name.partition(".")[0].removeprefix("_unsafe_"), list(args)
    if name in ("embedding", "embedding_bag") and len(values) > 1:
        values[:2] = values[1::-1]  # the operator takes the table first
    elif name in ("convolution", "_convolution", "convolution_overrideable") and len(values) > 8:
        data, weight, bias, stride, padding, dilation, transposed, more, groups = values[:9]
        if transposed is True:
            return "conv_transpose2d", [data, weight, bias, stride, padding, more, dilation, groups]
        return "conv2d", [data, weight, bias, stride, padding, dilation, groups]
    elif name == "slice" and len(values) > 1:
        return "slice", values
    return name, values


def cut(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `aten.slice(value, dim, start, end, step)`."""
    value, *rest = args
    dim, *bounds = [*rest, *kwargs.values()] or [0]
    bounds = [None if bound == 2**63 - 1 else bound for bound in bounds]
    if not isinstance(value, Flow | Weight) or not isinstance(dim, int) or dim < 0:
        return Flow(deps_of((args, kwargs)))
    return shapes.index(trace, value, (*[slice(None)] * dim, slice(*(bounds or [None]))))


def item(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `aten.index(value, [keys])`."""
    value, *keys = [*args, *kwargs.values()]
    given = keys[0] if keys and isinstance(keys[0], list | tuple) else keys
    return shapes.index(trace, value, tuple(slice(None) if key is None else key for key in given))
