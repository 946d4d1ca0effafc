"""Sums, differences, products and quotients of activations and weights, entry by entry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.comparisons import error_of
from megaopt_roles.forward.dependencies import ARGUMENT, JOINED, of_all
from megaopt_roles.forward.operations.names import PRODUCTS
from megaopt_roles.forward.shapes import indexing
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of, shape_of, terms_of, together, weights_of
from megaopt_roles.forward.weights import products, scales
from megaopt_roles.forward.weights.noise import drawn

__all__ = ["arithmetic", "interpolated"]


def arithmetic(trace: Trace, symbol: str, left: Any, right: Any) -> Any:
    """Return `left symbol right` for operands of which at least one is an activation or a weight.

    Args:
        trace: where uses are noted.
        symbol: `+` stands for every sum, `-` for a difference, `*` for every product and quotient, `@` for the product
            of matrices, `?` for comparisons.
        left: an operand.
        right: the other.
    """
    if symbol == "@":
        return products.product(trace, left, right)
    if isinstance(left, Weight) and isinstance(right, Weight):
        return scales.scale(trace, left, right) if symbol == "*" else scales.add(trace, left, right)
    if isinstance(left, Weight):
        return _with_weight(trace, symbol, left, right)
    if isinstance(right, Weight):
        return _with_weight(trace, symbol, right, left)
    if isinstance(left, Flow) and isinstance(right, Flow):
        return drawn(_of_activations(trace, symbol, left, right), (left, right))
    flow = left if isinstance(left, Flow) else right
    if not isinstance(flow, Flow):
        return trace.unknown(left, right)
    if symbol == "-" and type(left) in (int, float) and left == 1:
        trace.rests.add(flow.deps)
    return Flow(
        flow.deps,
        flow.tensor,
        flow.piece,
        one_hot=flow.one_hot,
        mixed=flow.mixed,
        terms=flow.terms,
        length=flow.length,
        noise=flow.noise,
        soft=flow.soft and symbol != "?",
    )


def interpolated(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a sum or product of two values, and of what else goes into it: the weight of an interpolation."""
    if name == "addcmul" and len(args) == 3:
        return arithmetic(trace, "+", args[0], arithmetic(trace, "*", *args[1:]))
    result, others = arithmetic(trace, _symbol(name), args[0], args[1]), (*args[2:], *kwargs.values())
    trace.use_all(weights_of(others), "elementwise")
    deps = deps_of(others)
    if name == "lerp":
        trace.note_all(deps, "sharing")
    return evolve(result, deps=result.deps | deps) if deps and isinstance(result, Flow | Weight) else result


def _symbol(name: str) -> str:
    if name in PRODUCTS:
        return "*"
    return "-" if "sub" in name else "+"


def _of_activations(trace: Trace, symbol: str, left: Flow, right: Flow) -> Flow:
    """Return `left symbol right` of two activations."""
    if symbol == "*":
        trace.multiply(left, right, summed=False)
        if right.length and right.deps <= left.deps:
            trace.unit |= left.deps
    result = _of_two(left, right)
    if left is right:
        trace.square(left)
    if symbol == "*" and not (left.soft or right.soft):
        apart = left.picked and right.picked and left is not right  # else a square, or an entropy
        alike = left.deps == right.deps
        single = any(indexing.last_size(flow) == 1 for flow in (left, right))  # a weight for each position
        factors = () if single or (alike and not apart) else (left.deps, right.deps)
        return evolve(result, factors=factors, picked=apart)
    if symbol == "*":
        scaled = _only_scales(left, right)
        shares = (one.deps for one in (left, right) if one.soft and not scaled)
        result = evolve(result, soft=scaled, shares=frozenset[Any]().union(*shares))
    if symbol == "-":
        result = evolve(result, error=error_of(left.deps, right.deps))
    if symbol in ("+", "-") and all(flow.soft or flow.one_hot for flow in (left, right)):
        result = evolve(result, soft=left.soft or right.soft)  # a choice, with the gradient of a softmax
    return _added(result, left, right) if symbol in ("+", "-") else result


def _only_scales(left: Flow, right: Flow) -> bool:
    """True for a softmax that is multiplied with a mask, or with what was made of it: it chooses still."""
    return any(
        one.soft and (other.soft or other.deps <= one.deps | {ARGUMENT})
        for one, other in ((left, right), (right, left))
    )


def _added(total: Flow, left: Flow, right: Flow) -> Flow:
    """Return a sum of two activations: what lay side by side before has been added to."""
    alike = left.deps <= right.deps or right.deps <= left.deps
    return total if alike or JOINED not in total.deps else evolve(total, deps=total.deps - {JOINED})


def _with_weight(trace: Trace, symbol: str, weight: Weight, other: Any) -> Any:
    if not isinstance(other, Flow) or not other.deps:
        if symbol == "*" and isinstance(other, Flow) and other.noise:
            trace.noisy.update(map(id, weight.params))
            trace.masked.update(map(id, weight.params) if shape_of(other) == weight.shape else ())
            return weight
        return scales.with_fixed(trace, symbol, weight, shape_of(other))
    if symbol in ("*", "/") and shape_of(other) == ():
        return weight  # a number that is given scales it
    # A kernel, of which each sample has its own scale; what has one axis, beside those of one, is a gain.
    modulated = symbol == "*" and len(weight.shape or ()) > 3 and sum(n > 1 for n in weight.shape or ()) > 1
    trace.use(weight, Use("modulated" if modulated else "elementwise"))
    if modulated:
        return Weight(weight.params, weight.shape, weight.axes, weight.base, weight.deps | other.deps)
    before = shape_of(other)
    weighed = (weight, before) if symbol == "*" and before is not None else None
    deps = other.deps | trace.made(weight)
    moved = (*other.moved, weight) if symbol in ("+", "-") and len(weight.shape or ()) > 1 else other.moved
    return evolve(other, deps=deps, fresh=False, call=None, weighed=weighed, moved=moved, coded=False)


def _of_two(left: Flow, right: Flow) -> Flow:
    deps = of_all((left.deps, right.deps))
    if left.piece is not None and right.piece is not None:
        same = left.piece is right.piece and left.tensor is not None and right.tensor is not None
        if same and left.tensor.shape == right.tensor.shape:  # type: ignore[union-attr]
            return Flow(deps, left.tensor, left.piece)
        shape = None if left.tensor is None else left.tensor.to("meta")
        return Flow(deps, shape, mixed=left.pieces + right.pieces, terms=terms_of(left, right))
    terms = terms_of(left, right)
    if terms:
        return together(deps, terms)
    if left.piece is not None or right.piece is not None:
        flow, other = (left, right) if left.piece is not None else (right, left)
        wider = (
            other.tensor is not None and flow.tensor is not None and other.tensor.dim() > flow.tensor.dim()
        )
        return Flow(deps) if wider else Flow(deps, flow.tensor, flow.piece)
    return Flow(deps, _broadcast(left.tensor, right.tensor), mixed=left.mixed + right.mixed)


def _broadcast(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    try:
        return torch.empty(torch.broadcast_shapes(left.shape, right.shape), device="meta")
    except RuntimeError:
        return None
