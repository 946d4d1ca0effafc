"""What functions and methods of torch do to activations and weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward import lookups, packing
from megaopt_roles.forward.comparisons import error_of
from megaopt_roles.forward.dependencies import ARGUMENT, JOINED
from megaopt_roles.forward.lookups import argument
from megaopt_roles.forward.op_names import (
    BOUNDED,
    CLASS_LOSSES,
    CUTS,
    EXTREMES,
    HARMLESS,
    JOINS,
    KEEPS_SHAPE,
    LENGTHS,
    PRODUCTS,
    RECTIFIES,
    SUMS,
)
from megaopt_roles.forward.operations import aten
from megaopt_roles.forward.rows import bound, lies_along, merge
from megaopt_roles.forward.shapes import functions, indexing, moves
from megaopt_roles.forward.trace import BATCH, Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of, is_abstract, weights_of
from megaopt_roles.forward.weights import (
    contractions,
    einsums,
    parameter_products,
    products,
    scales,
    tensordots,
)
from megaopt_roles.forward.weights.forms import join
from megaopt_roles.forward.weights.noise import DENSITIES, density, drawn, is_drawn

__all__ = ["arithmetic", "is_known", "operation"]


def is_known(name: str) -> bool:
    """True for the names of tensor methods that `operation` says more about than what they depend on."""
    return any(name in names for names in (CUTS, _SPECIAL, functions.SHAPE_OPS, SUMS, PRODUCTS, LENGTHS))


def operation(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a function of torch, or of a method of a tensor (its first argument).

    Args:
        trace: where uses are noted.
        name: of the function, without its module.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if is_drawn(name, args):
        return Flow(noise=True)
    if name in ("sum", "mean"):
        _note_sum(trace, args, kwargs)
    if name in CUTS:
        return _cut(trace, name, args, kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(trace, args, kwargs)
    if name in CLASS_LOSSES or name.endswith("_loss"):
        return trace.loss(*args, *kwargs.values(), classes=name in CLASS_LOSSES)
    if name in functions.SHAPE_OPS and args:
        return _moved(name, args[0], drawn(moves.move(trace, name, args, kwargs), args[:1]))
    if name in JOINS:
        return _join(trace, name, args, kwargs)
    if (name in SUMS or name in PRODUCTS) and len(args) > 1:
        return _mixed(trace, name, args, kwargs)
    if name in KEEPS_SHAPE and args:
        _note_activation(trace, name, args[0])
        kept = _keep(trace, args, kwargs)
        return evolve(kept, coded=False) if name == "cumsum" and isinstance(kept, Flow) else kept
    return drawn(_anything(trace, name, args, kwargs), args)


def _note_sum(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Note what a sum of products is: a comparison of activations, or a product with a matrix."""
    summed = argument(0, "input", args, kwargs)
    if isinstance(summed, Flow) and summed.factors:
        trace.compare(*summed.factors)
    if isinstance(summed, Flow) and summed.weighed:
        contractions.sum_of_products(trace, summed, argument(1, "dim", args, kwargs))


def _moved(name: str, before: Any, after: Any) -> Any:
    """Return what a shape operation made of a value; what became of a softmax, or each part of it, chooses still."""
    if not (isinstance(before, Flow) and (before.soft or before.length)):
        return after
    if isinstance(after, list) and name != "unbind":
        return [evolve(part, soft=before.soft) for part in after]
    return evolve(after, soft=before.soft, length=before.length) if isinstance(after, Flow) else after


def _symbol(name: str) -> str:
    if name in PRODUCTS:
        return "*"
    return "-" if "sub" in name else "+"


def _note_activation(trace: Trace, name: str, value: Any) -> None:
    """Note what a sigmoid, a ReLU or the like is taken of."""
    if name in BOUNDED:
        bound(flows_of(value))
    elif name in RECTIFIES:
        trace.rectify(flows_of(value))
    elif name in ("pow", "square", "abs"):
        trace.square(value)
    elif name == "normalize":
        trace.unit |= deps_of(value)


def _mixed(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a sum or product of two values, and of what else goes into it: the weight of an interpolation."""
    if name == "addcmul" and len(args) == 3:
        return arithmetic(trace, "+", args[0], arithmetic(trace, "*", *args[1:]))
    result, others = arithmetic(trace, _symbol(name), args[0], args[1]), (*args[2:], *kwargs.values())
    trace.use_all(weights_of(others), "elementwise")
    deps = deps_of(others)
    return evolve(result, deps=result.deps | deps) if deps and isinstance(result, Flow | Weight) else result


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
    return Flow(
        flow.deps,
        flow.tensor,
        flow.piece,
        one_hot=flow.one_hot,
        mixed=flow.mixed,
        terms=flow.terms,
        length=flow.length,
        noise=flow.noise,
    )


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
    if symbol == "-":
        result = evolve(result, error=error_of(left.deps, right.deps))
    if symbol in ("+", "-") and all(flow.soft or flow.one_hot for flow in (left, right)):
        result = evolve(result, soft=left.soft or right.soft)  # a choice, with the gradient of a softmax
    return _added(result, left, right) if symbol in ("+", "-") else result


def _added(total: Flow, left: Flow, right: Flow) -> Flow:
    """Return a sum of two activations: what lay side by side before has been added to."""
    alike = left.deps <= right.deps or right.deps <= left.deps
    return total if alike or JOINED not in total.deps else evolve(total, deps=total.deps - {JOINED})


def _with_weight(trace: Trace, symbol: str, weight: Weight, other: Any) -> Any:
    if not isinstance(other, Flow) or not other.deps:
        if symbol == "*" and isinstance(other, Flow) and other.noise:
            trace.noisy.update(map(id, weight.params))
            return weight
        shape = tuple(other.tensor.shape) if isinstance(other, Flow) and other.tensor is not None else None
        return scales.with_fixed(trace, symbol, weight, shape)
    # A kernel, of which each sample has its own scale; what has one axis, beside those of one, is a gain.
    before = None if other.tensor is None else tuple(other.tensor.shape)
    modulated = symbol == "*" and len(weight.shape or ()) > 3 and sum(n > 1 for n in weight.shape or ()) > 1
    trace.use(weight, Use("modulated" if modulated else "elementwise"))
    if modulated:
        return Weight(weight.params, weight.shape, weight.axes, weight.base, weight.deps | other.deps)
    weighed = (weight, before) if symbol == "*" and before is not None else None
    deps = other.deps | trace.made(weight)
    moved = (*other.moved, weight) if symbol in ("+", "-") and len(weight.shape or ()) > 1 else other.moved
    return evolve(other, deps=deps, fresh=False, call=None, weighed=weighed, moved=moved, coded=False)


def _of_two(left: Flow, right: Flow) -> Flow:
    deps = left.deps | right.deps
    if left.piece is not None and right.piece is not None:
        same = left.piece is right.piece and left.tensor is not None and right.tensor is not None
        if same and left.tensor.shape == right.tensor.shape:  # type: ignore[union-attr]
            return Flow(deps, left.tensor, left.piece)
        shape = None if left.tensor is None else left.tensor.to("meta")
        return Flow(deps, shape, mixed=left.pieces + right.pieces, terms=_terms(left, right))
    terms = _terms(left, right)
    if terms:
        return Flow(deps, terms[0].tensor, mixed=left.pieces + right.pieces, terms=terms)
    if left.piece is not None or right.piece is not None:
        flow, other = (left, right) if left.piece is not None else (right, left)
        wider = (
            other.tensor is not None and flow.tensor is not None and other.tensor.dim() > flow.tensor.dim()
        )
        return Flow(deps) if wider else Flow(deps, flow.tensor, flow.piece)
    return Flow(deps, _broadcast(left.tensor, right.tensor), mixed=left.mixed + right.mixed)


def _terms(left: Flow, right: Flow) -> tuple[Flow, ...]:
    """Return the activations of one shape that a sum or product of two goes on with."""
    found = tuple(
        Flow(flow.deps, flow.tensor, flow.piece) for side in (left, right) for flow in (side.terms or (side,))
    )
    sizes = {None if flow.tensor is None or flow.piece is None else flow.tensor.shape for flow in found}
    return found if len(sizes) == 1 and None not in sizes else ()


def _broadcast(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    try:
        return torch.empty(torch.broadcast_shapes(left.shape, right.shape), device="meta")
    except RuntimeError:
        return None


def _keep(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value, others = args[0], (*args[1:], *kwargs.values())
    trace.use_all(weights_of(others), "elementwise")
    if isinstance(value, Weight):
        return value
    if isinstance(value, Flow):
        return evolve(value, deps=value.deps | deps_of(others), fresh=False, mixed=(), call=None, factors=())
    return trace.unknown(value, *others)


def _softmax(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    lookups.note_attention(trace, args)
    trace.note_scores(deps_of(args[:1]))
    trace.note_memory(deps_of(args[:1]))
    trace.use_all(weights_of(args[:1]), "softened")
    result = _keep(trace, args, kwargs) if args else trace.unknown(kwargs)
    if not isinstance(result, Flow):
        return result
    dim = lookups.argument(1, "dim", args, kwargs)
    if any(lies_along(flow, dim) for flow in (result, *result.terms)):
        return evolve(result, soft=True, piece=None, mixed=(), terms=())
    return evolve(result, soft=True)


def _cut(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a value through which no gradient flows: it comes from no call any more."""
    if name == "detach" and args and isinstance(args[0], Weight):
        return args[0]
    deps = deps_of((args, kwargs))
    if name.startswith("arg"):
        lookups.note_ranks(trace, args[:1])
    tensor = (
        args[0].tensor
        if args and isinstance(args[0], Flow) and name.startswith(("detach", "zeros_like"))
        else None
    )
    tensor = None if tensor is None else tensor.to("meta")
    soft = name == "detach" and any(flow.soft for flow in flows_of(args[:1]))
    one_hot = name == "one_hot" or (name == "eq" and len(args) == 2 and lookups.equal(*args))
    return Flow(
        frozenset({ARGUMENT}) if deps else deps,
        tensor,
        one_hot=one_hot,
        soft=soft,
        coded=one_hot and bool(deps),
    )


def _adds_positions(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True where values are stacked along an axis before their features: what is made of parts are steps of a scan."""
    dim = argument(1, "dim", args, kwargs)
    return name == "stack" and (dim is None or (isinstance(dim, int) and dim in (0, 1)))


def _join(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    flows, found = flows_of((args, kwargs)), weights_of((args, kwargs))
    merge(flow for flow in flows if flow.piece is not None or not _adds_positions(name, args, kwargs))
    if found and not any(flow.deps for flow in flows):
        if all(weight.base is found[0].base and weight.axes == found[0].axes for weight in found):
            return found[0]
        dim = argument(1, "dim", args, kwargs) or 0
        added = "stack" in name
        return join(found, dim if isinstance(dim, int) and name in ("cat", "stack") else None, added=added)
    trace.use_all(found, "beside")
    beside = _laid_beside([*found, *flows], argument(1, "dim", args, kwargs))
    joined = evolve(
        trace.unknown(args, kwargs), tensor=beside if name in ("cat", "concat", "concatenate") else None
    )
    return evolve(joined, deps=joined.deps | {JOINED}) if len(joined.deps) > 1 else joined


def _laid_beside(parts: Sequence[Flow | Weight], dim: Any) -> torch.Tensor | None:
    """Return what stands in for activations that lie along positions beside others, or beside the rows of a weight.

    What is known of one tells how many dimensions they have, and how many features; not how many positions.
    """
    for part in parts if isinstance(dim, int) and dim > 0 else ():
        tensor = part.tensor if isinstance(part, Flow) and part.piece is not None else None
        shape = part.shape if isinstance(part, Weight) else None if tensor is None else tuple(tensor.shape)
        if shape is None or dim >= len(shape) - 1 or (isinstance(part, Flow) and lies_along(part, dim)):
            continue
        return torch.empty((BATCH[0], *shape[1:dim], shape[dim] + BATCH[1], *shape[dim + 1 :]), device="meta")
    return None


def _anything(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
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


def _scatter(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what `scatter` does: one-hot codes where it writes single ones into what no layer made.

    Several ones at a time, by an index without an axis of one at its end, are features: what somebody has bought.
    """
    made, written = _anything(trace, "scatter", args, kwargs), argument(3, "value", args, kwargs)
    at = argument(2, "index", args, kwargs)
    single = isinstance(at, Flow) and at.tensor is not None and tuple(at.tensor.shape[-1:]) == (1,)
    if not (single and isinstance(written, int | float) and written == 1 and isinstance(made, Flow)):
        return made
    codes = made.deps == {ARGUMENT}
    return evolve(made, one_hot=codes, coded=codes)


def _linear(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    trace.use_all(weights_of(argument(2, "bias", args, kwargs)), "elementwise")
    return products.linear(trace, argument(0, "input", args, kwargs), argument(1, "weight", args, kwargs))


def _product(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    operands = [*args, *kwargs.values()]  # scales and dtypes of quantized products come third
    return products.product(trace, *operands[:2]) if len(operands) > 1 else trace.unknown(*operands)


def _add_product(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    added, *factors = [*args, *(value for key, value in kwargs.items() if key not in ("alpha", "beta"))]
    trace.use_all(weights_of(added), "elementwise")
    if len(factors) < 2:
        return trace.unknown(added, *factors)
    result = products.product(trace, factors[0], factors[1])
    if isinstance(result, Weight):
        return result
    return Flow(result.deps | deps_of(added), result.tensor, result.piece)


def _convolve(*, transposed: bool) -> Callable[[Trace, Sequence[Any], dict[str, Any]], Any]:
    def convolve(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        groups = argument(7 if transposed else 6, "groups", args, kwargs)
        weight = argument(1, "weight", args, kwargs)
        trace.use_all(weights_of(argument(2, "bias", args, kwargs)), "elementwise")
        groups = 1 if groups is None else groups
        activation = argument(0, "input", args, kwargs)
        return products.convolve(trace, activation, weight, groups, transposed=transposed)

    return convolve


def _einsum(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if len(args) > 2 and is_abstract(args[0]) and isinstance(args[1], list | tuple):
        return einsums.einsum(trace, *einsums.lettered(args))
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if args and not isinstance(args[0], str) and isinstance(args[-1], str):
        return einsums.einsum(trace, einsums.with_letters(args[-1]), args[:-1])  # of einops
    return einsums.einsum(trace, args[0] if args else None, operands)


_SPECIAL: dict[str, Callable[[Trace, Sequence[Any], dict[str, Any]], Any]] = {
    **dict.fromkeys(
        (
            *("matmul", "mm", "bmm", "mv", "dot", "__matmul__"),
            *("_grouped_mm", "grouped_mm", "_scaled_mm", "scaled_mm", "_scaled_grouped_mm", "_int_mm"),
        ),
        _product,
    ),
    **dict.fromkeys(("multi_dot", "chain_matmul"), tensordots.chain),
    "tensordot": tensordots.tensordot,
    "inner": tensordots.inner,
    "slice": aten.cut,
    "index": aten.item,
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addmm_", "baddbmm_"), _add_product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_nd"), _convolve(transposed=False)),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _convolve(transposed=True)),
    **dict.fromkeys(("index_select", "gather", "take", "take_along_dim"), lookups.select),
    "linear": _linear,
    **dict.fromkeys(DENSITIES, density),
    **dict.fromkeys(("softmax", "gumbel_softmax"), _softmax),
    "cdist": lookups.compare,
    "cosine_similarity": lookups.cosine,
    "zeros": lookups.zeros,
    "grad": lookups.gradients,
    "einsum": _einsum,
    "embedding": lookups.embedding,
    "embedding_bag": lookups.embedding,
    "bilinear": lookups.bilinear,
    "multi_head_attention_forward": lookups.multi_head_attention,
    "topk": lookups.rank,
    "pack": packing.pack,
    "unpack": packing.unpack,
    "pad": lookups.pad,
    **dict.fromkeys(("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool"), lookups.pool),
    "sort": lookups.rank,
    **dict.fromkeys(("scatter", "scatter_"), _scatter),
    "scaled_dot_product_attention": lookups.attention,
}
