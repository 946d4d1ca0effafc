"""Products with matrices, by the arguments that functions of torch take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, is_abstract, weights_of
from megaopt_roles.forward.weights import contractions, einsums, products

__all__ = ["add_product", "bilinear", "convolve", "einsum", "linear", "product"]


def linear(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `F.linear(input, weight, bias)`."""
    trace.use_all(weights_of(argument(2, "bias", args, kwargs)), "elementwise")
    return products.linear(trace, argument(0, "input", args, kwargs), argument(1, "weight", args, kwargs))


def product(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.matmul(a, b)`, and what products of quantized or grouped matrices return."""
    operands = [*args, *kwargs.values()]  # scales and dtypes of quantized products come third
    return products.product(trace, *operands[:2]) if len(operands) > 1 else trace.unknown(*operands)


def add_product(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.addmm(added, a, b)` and the like."""
    added, *factors = [*args, *(value for key, value in kwargs.items() if key not in ("alpha", "beta"))]
    trace.use_all(weights_of(added), "elementwise")
    if len(factors) < 2:
        return trace.unknown(added, *factors)
    result = products.product(trace, factors[0], factors[1])
    if isinstance(result, Weight):
        return result
    return Flow(result.deps | deps_of(added), result.tensor, result.piece)


def convolve(*, transposed: bool) -> Callable[[Trace, Sequence[Any], dict[str, Any]], Any]:
    """Return the function that says what `F.conv2d`, or `F.conv_transpose2d`, returns, of any number of dimensions."""

    def convolve(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        groups = argument(7 if transposed else 6, "groups", args, kwargs)
        weight = argument(1, "weight", args, kwargs)
        trace.use_all(weights_of(argument(2, "bias", args, kwargs)), "elementwise")
        groups = 1 if groups is None else groups
        activation = argument(0, "input", args, kwargs)
        return products.convolve(trace, activation, weight, groups, transposed=transposed)

    return convolve


def einsum(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `torch.einsum(equation, ...)`, with letters or lists of axes, and `einops.einsum(..., pattern)`."""
    if len(args) > 2 and is_abstract(args[0]) and isinstance(args[1], list | tuple):
        return einsums.einsum(trace, *einsums.lettered(args))
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if args and not isinstance(args[0], str) and isinstance(args[-1], str):
        return einsums.einsum(trace, einsums.with_letters(args[-1]), args[:-1])  # of einops
    return einsums.einsum(trace, args[0] if args else None, operands)


def bilinear(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `F.bilinear(a, b, weight)`, whose weight is `[out, a, b]`."""
    weight = argument(2, "weight", args, kwargs)
    if isinstance(weight, Weight):
        trace.use_all(weights_of(argument(3, "bias", args, kwargs)), "elementwise")
        contractions.contract(trace, weight, (1, 2), (0,))
        return Flow(trace.weigh(weight, args, kwargs))
    return trace.unknown(args, kwargs)
