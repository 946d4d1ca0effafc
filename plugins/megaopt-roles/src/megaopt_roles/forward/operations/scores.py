"""Scores, by which something is chosen: softmaxes, attention, distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from megaopt_roles.forward.comparisons import error_of
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.entrywise import keep
from megaopt_roles.forward.rows import lies_along
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, deps_of, weights_of
from megaopt_roles.forward.weights import contractions

__all__ = ["attention", "compare", "cosine", "fused", "multi_head_attention", "softmax"]


def softmax(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a softmax, which chooses; the weights that made its scores with activations are queries or keys."""
    trace.choose(Flow(deps_of(args)), by_row=True)
    trace.note_scores(deps_of(args[:1]))
    trace.note_memory(deps_of(args[:1]))
    trace.use_all(weights_of(args[:1]), "softened")
    result = keep(trace, args, kwargs) if args else trace.unknown(kwargs)
    if not isinstance(result, Flow):
        return result
    dim = argument(1, "dim", args, kwargs)
    if any(lies_along(flow, dim) for flow in (result, *result.terms)):
        return evolve(result, soft=True, piece=None, mixed=(), terms=())
    return evolve(result, soft=True)


def attention(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `F.scaled_dot_product_attention(q, k, v)`."""
    for weight in weights_of((args, kwargs)):
        trace.use(weight, Use("attending" if weight.base.dim() == 2 else "elementwise"))
    query, key = argument(0, "query", args, kwargs), argument(1, "key", args, kwargs)
    trace.note_scores(deps_of((query, key)))
    trace.multiply(query, key)
    return trace.unknown(args, kwargs)


def multi_head_attention(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Flow]:
    """Return output and attention of `F.multi_head_attention_forward`, whose weights are all stored [out, in]."""
    deps = deps_of((args, kwargs))
    for weight in weights_of((args, kwargs)):
        if len(weight.shape or ()) == 2:
            contractions.contract(trace, weight, (1,), (0,))
            deps |= trace.weigh(weight, Flow(deps))
        else:
            trace.use(weight, Use("elementwise"))
    return [Flow(deps), Flow(deps)]


def compare(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return how far activations are from the rows of a weight: what these were compared with is followed."""
    found = weights_of((args, kwargs))
    trace.use_all(found, "elementwise")
    deps = deps_of((args, kwargs))
    sides = [*args, *kwargs.values()][:2]
    trace.multiply(*sides)
    if all(map(deps_of, sides)):
        trace.against |= error_of(*map(deps_of, sides))
    return Flow(frozenset[Any]().union(*(trace.weigh(weight, Flow(deps)) for weight in found)) or deps)


def cosine(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the cosine of the angle between activations, of which only the directions matter."""
    trace.unit |= deps_of((args, kwargs))
    return compare(trace, args, kwargs)


def fused(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what one kernel makes for a whole layer of torch's; its weights are told by what is done without it."""
    return trace.unknown(args, kwargs)
