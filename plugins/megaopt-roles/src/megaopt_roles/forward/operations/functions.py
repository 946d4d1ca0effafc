"""The result of any function or method of torch, by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attrs import evolve

from megaopt_roles.forward.comparisons import as_number
from megaopt_roles.forward.operations import (
    aten,
    codes,
    derivatives,
    joins,
    lookups,
    matrices,
    packing,
    scores,
)
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.arithmetic import interpolated
from megaopt_roles.forward.operations.entrywise import anything, keep, where
from megaopt_roles.forward.operations.names import (
    BOUNDED,
    CLASS_LOSSES,
    CUTS,
    JOINS,
    KEEPS_SHAPE,
    LENGTHS,
    PRODUCTS,
    RECTIFIES,
    SQUARES,
    SUMS,
    TOTALS,
)
from megaopt_roles.forward.rows import bound
from megaopt_roles.forward.shapes import moves
from megaopt_roles.forward.shapes.functions import SHAPE_OPS, by_position
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, deps_of, flows_of, weights_of
from megaopt_roles.forward.weights import contractions, tensordots
from megaopt_roles.forward.weights.noise import DENSITIES, density, drawn, is_drawn, likelihood

__all__ = ["is_known", "operation"]


def is_known(name: str) -> bool:
    """True for the names of tensor methods that `operation` says more about than what they depend on."""
    return any(name in names for names in (CUTS, _SPECIAL, SHAPE_OPS, SUMS, PRODUCTS, LENGTHS, SQUARES))


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
    if name in TOTALS:
        return _sum(trace, name, args, kwargs)
    if name in CUTS:
        return codes.cut_off(trace, name, args, kwargs)
    special = _SPECIAL.get(name)
    if special is not None:
        return special(trace, args, kwargs)
    if name in CLASS_LOSSES or name.endswith("_loss"):
        return trace.loss(*args, *kwargs.values(), classes=name in CLASS_LOSSES)
    placed, named = by_position(name, args, kwargs) if name in SHAPE_OPS else ([], {})
    if placed:
        return _moved(name, placed[0], drawn(moves.move(trace, name, placed, named), placed[:1]))
    if name in JOINS:
        return joins.joined(trace, name, args, kwargs)
    if (name in SUMS or name in PRODUCTS) and len(args) > 1:
        return interpolated(trace, name, args, kwargs)
    if name in KEEPS_SHAPE and args:
        _note_activation(trace, name, args[0])
        kept = keep(trace, args, kwargs)
        return evolve(kept, coded=False) if name == "cumsum" and isinstance(kept, Flow) else kept
    return drawn(anything(trace, name, args, kwargs), args)


def _sum(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a sum or a mean, and note what one of products is: a comparison of activations, or a product."""
    summed = argument(0, "input", args, kwargs)
    if isinstance(summed, Flow):
        trace.note_all(summed.shares, "proportioning")
        if summed.factors:
            trace.compare(*summed.factors)
        if summed.weighed:
            contractions.sum_of_products(trace, summed, argument(1, "dim", args, kwargs))
    made = drawn(anything(trace, name, args, kwargs), args)
    total = isinstance(made, Flow) and len(args) == 1 and not kwargs
    return as_number(made) if total else made


def _moved(name: str, before: Any, after: Any) -> Any:
    """Return what a shape operation made of a value; what became of a softmax, or each part of it, chooses still.

    What became of zeros is what a recurrence begins with.
    """
    if not (isinstance(before, Flow) and (before.soft or before.length or before.zero or before.shares)):
        return after
    if isinstance(after, list):
        return [evolve(part, soft=before.soft and name != "unbind", zero=before.zero) for part in after]
    if not isinstance(after, Flow):
        return after
    return evolve(after, soft=before.soft, length=before.length, zero=before.zero, shares=before.shares)


def _note_activation(trace: Trace, name: str, value: Any) -> None:
    """Note what a sigmoid, a ReLU or the like is taken of."""
    if name in BOUNDED:
        bound(flows_of(value))
    elif name in RECTIFIES:
        trace.rectify(flows_of(value))
    elif name in SQUARES:
        trace.square(value)
    elif name in ("tril", "triu"):
        trace.use_all(weights_of(value), "triangular")
    elif name == "normalize":
        trace.unit |= deps_of(value)


_SPECIAL: dict[str, Callable[[Trace, Sequence[Any], dict[str, Any]], Any]] = {
    # products
    **dict.fromkeys(
        (
            *("matmul", "mm", "bmm", "mv", "dot", "__matmul__"),
            *("_grouped_mm", "grouped_mm", "_scaled_mm", "scaled_mm", "_scaled_grouped_mm", "_int_mm"),
        ),
        matrices.product,
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "addmm_", "baddbmm_"), matrices.add_product),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "conv_nd"), matrices.convolve(transposed=False)),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), matrices.convolve(transposed=True)
    ),
    "linear": matrices.linear,
    "bilinear": matrices.bilinear,
    "einsum": matrices.einsum,
    "tensordot": tensordots.tensordot,
    "inner": tensordots.inner,
    **dict.fromkeys(("multi_dot", "chain_matmul"), tensordots.chain),
    # scores
    **dict.fromkeys(("softmax", "gumbel_softmax"), scores.softmax),
    **dict.fromkeys(("_transformer_encoder_layer_fwd", "_native_multi_head_attention"), scores.fused),
    "scaled_dot_product_attention": scores.attention,
    "multi_head_attention_forward": scores.multi_head_attention,
    "cdist": scores.compare,
    "cosine_similarity": scores.cosine,
    **dict.fromkeys(DENSITIES, density),
    "log_prob": likelihood,
    # rows that are looked up, ranked or cut out
    **dict.fromkeys(("embedding", "embedding_bag"), lookups.embedding),
    **dict.fromkeys(("index_select", "gather", "take", "take_along_dim"), lookups.select),
    **dict.fromkeys(("topk", "sort"), lookups.rank),
    **dict.fromkeys(("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool"), lookups.pool),
    "pad": lookups.pad,
    "where": where,
    "slice": aten.cut,
    "index": aten.item,
    "pack": packing.pack,
    "unpack": packing.unpack,
    # what no layer made
    **dict.fromkeys(("scatter", "scatter_"), codes.scatter),
    "zeros": codes.zeros,
    "eye": codes.eye,
    "grad": derivatives.grad,
    **dict.fromkeys(
        ("_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic"), codes.nothing
    ),
}
