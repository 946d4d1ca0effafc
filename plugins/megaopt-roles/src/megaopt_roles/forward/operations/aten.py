"""The operators of `torch.ops.aten`, as the functions and indices that they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaopt_roles.forward.shapes import indexing
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of

__all__ = ["as_function", "cut", "item"]


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
    return name, values


def cut(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `aten.slice(value, dim, start, end, step)`."""
    value, *rest = args
    dim, *bounds = [*rest, *kwargs.values()] or [0]
    bounds = [None if bound == 2**63 - 1 else bound for bound in bounds]
    if not isinstance(value, Flow | Weight) or not isinstance(dim, int) or dim < 0:
        return Flow(deps_of((args, kwargs)))
    return indexing.index(trace, value, (*[slice(None)] * dim, slice(*(bounds or [None]))))


def item(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `aten.index(value, [keys])`."""
    value, *keys = [*args, *kwargs.values()]
    given = keys[0] if keys and isinstance(keys[0], list | tuple) else keys
    return indexing.index(trace, value, tuple(slice(None) if key is None else key for key in given))
