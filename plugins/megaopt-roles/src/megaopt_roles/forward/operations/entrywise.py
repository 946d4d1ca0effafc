"""Functions that keep the shape of what they are given, and those of which no more is known than their name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from megaopt_roles.forward.operations.names import EXTREMES, HARMLESS, LENGTHS
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, weights_of
from megaopt_roles.forward.weights import parameter_products
from megaopt_roles.forward.weights.noise import drawn

__all__ = ["anything", "keep"]


def keep(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the first argument as a function leaves it that keeps its shape: what else it is given goes into it."""
    value, others = args[0], (*args[1:], *kwargs.values())
    trace.use_all(weights_of(others), "elementwise")
    if isinstance(value, Weight):
        return value
    if isinstance(value, Flow):
        return evolve(value, deps=value.deps | deps_of(others), fresh=False, mixed=(), call=None, factors=())
    return trace.unknown(value, *others)


def where(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what `torch.where` picks: of an activation and a number that activation, as `masked_fill` does."""
    if len(args) == 3 and isinstance(args[1], Flow) and isinstance(args[2], int | float):
        return keep(trace, (args[1], args[0]), kwargs)
    return drawn(anything(trace, "where", args, kwargs), args)


def anything(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of another function: one that contracts nothing, or one that may do anything."""
    flows, found = flows_of((args, kwargs)), weights_of((args, kwargs))
    if found and not any(flow.deps for flow in flows):
        if name in EXTREMES and len(found) == 1:
            trace.use_all(found, "measured")
            return Flow()
        if name in ("sum", "mean") and len(found) == len(args) == 1 and not kwargs:
            trace.use_all(found, "penalized")
            return Flow()
        return found[0] if len(found) == 1 else parameter_products.function_of_parameters(trace, name, found)
    if name in HARMLESS:
        trace.use_all(found, "elementwise")
        return evolve(trace.unknown(args, kwargs), length=name in LENGTHS)
    return trace.passed(found, args, kwargs)
