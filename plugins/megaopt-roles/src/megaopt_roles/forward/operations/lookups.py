"""Functions that look rows up, rank them, pad them or cut them out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.dependencies import ARGUMENT, call_behind, is_mark
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.rows import lies_along
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.uses import Use
from megaopt_roles.forward.values import Flow, Weight, deps_of, weights_of
from megaopt_roles.forward.weights.parts import index_weight

__all__ = ["embedding", "note_ranks", "pad", "pool", "rank", "select"]


def embedding(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `F.embedding(ids, table)`, and what a bag of it returns."""
    ids, table = argument(0, "input", args, kwargs), argument(1, "weight", args, kwargs)
    if isinstance(table, Weight):
        trace.use(table, Use("indexed" if deps_of(ids) else "looked_up"))
        return trace.picked(table, deps_of(ids), None if table.shape is None else table.shape[-1])
    return evolve(trace.unknown(ids, table), picked=bool(deps_of(ids)))


def select(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return `table.index_select(dim, ids)`, `gather` and the like."""
    table = args[0] if args else None
    if isinstance(table, Weight):
        at = argument(2, "index", args, kwargs)
        if argument(1, "dim", args, kwargs) == 0 and isinstance(at, Flow) and not at.deps:
            return index_weight(trace, table, [at])  # in another order, say
        rows = len(table.shape or ()) == 2 and deps_of((args[1:], kwargs))
        trace.use(table, Use("indexed" if rows else "looked_up"))
        if table.right and rows:
            return trace.picked(table, frozenset({ARGUMENT}))
    given = bool(deps_of((args[1:], kwargs)))  # through an index flows no gradient
    deps = deps_of(table) | (frozenset({ARGUMENT}) if given else frozenset())
    return Flow(deps, mixed=table.pieces if isinstance(table, Flow) else (), picked=given)


def rank(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Flow]:
    """Return the values that are ranked, and their positions, through which no gradient flows."""
    trace.use_all(weights_of((args, kwargs)), "elementwise")
    values = trace.unknown(args, kwargs)
    note_ranks(trace, values)
    return [values, Flow(frozenset({ARGUMENT}) if values.deps else values.deps)]


def note_ranks(trace: Trace, values: Any) -> None:
    """Note stacks of weights whose products are ranked: of keys that are compared, the best ones are looked up.

    What a view has made a stack is one, too.

    Args:
        trace: where it is noted.
        values: what is ranked.
    """
    for dep in deps_of(values):
        if is_mark(dep) or not isinstance(dep.module, torch.nn.Parameter):
            continue
        if dep.module.dim() > 2 or call_behind(dep).stacked:
            trace.note_owner(dep.module, "ranked")


def pad(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a padded value; what a bare weight returned is padded where its rows are positions (relative tables).

    These are along the last axis: where it keeps its size, steps of a sequence are shifted or added.
    """
    pads = argument(1, "pad", args, kwargs)
    lengthened = _lengthened(args[0], pads) if args and isinstance(args[0], Flow) else None
    if lengthened is not None:
        return lengthened
    kept = isinstance(pads, list | tuple) and [*pads[:2]] == [0, 0]
    for dep in () if kept else deps_of((args, kwargs)):
        if not is_mark(dep) and isinstance(dep.module, torch.nn.Parameter):
            trace.note_owner(dep.module, "padded")
    if args and isinstance(args[0], Weight):
        trace.use(args[0], Use("padded"))
        return evolve(args[0], shape=None, axes=None)
    trace.use_all(weights_of((args, kwargs)), "elementwise")
    one_hot = bool(args) and isinstance(args[0], Flow) and args[0].one_hot  # with positions without a one
    return evolve(trace.unknown(args, kwargs), one_hot=one_hot)


def _lengthened(value: Flow, pads: Any) -> Flow | None:
    """Return an activation that is padded along other axes than that of its features; None for any other."""
    if value.piece is None or value.tensor is None or not isinstance(pads, list | tuple):
        return None
    if not all(isinstance(size, int) for size in pads) or len(pads) % 2 or len(pads) > 2 * value.tensor.dim():
        return None
    rows = value.tensor
    for at, (before, after) in enumerate(batched(pads, 2)):
        if (before, after) == (0, 0):
            continue
        dim, sizes = rows.dim() - 1 - at, [*rows.shape]
        sizes[dim] += before + after
        if lies_along(value, dim) or sizes[dim] < 1:
            return None
        rows = rows.narrow(dim, 0, 1).expand(sizes)
    return evolve(value, tensor=rows.contiguous(), fresh=False, call=None)


def pool(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what is cut out of an image at given boxes, through which no gradient flows."""
    trace.use_all(weights_of((args, kwargs)), "elementwise")
    return Flow(deps_of(args[0] if args else kwargs.get("input")))
