"""Matrix products, convolutions and lookups: which dimensions of a parameter they contract, or index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod

from attrs import evolve

from megaopt_roles.watch._notes import Contraction, Notes, Use
from megaopt_roles.watch._op import Op
from megaopt_roles.watch._values import NOTHING, WEIGHED, Atom, Axes, Met, Run, Value, blank, weighed

__all__ = ["FACTORS", "LOOKUPS", "joined", "lookup", "product"]

FACTORS = {
    **dict.fromkeys(("mm", "bmm", "linear", "mv", "_grouped_mm", "_scaled_mm", "_int_mm", "dot"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
    **dict.fromkeys(("convolution", "_convolution"), (0, 1)),
    "_trilinear": (0, 1, 2),
}
"""Operators that multiply matrices, with the positions of these among their arguments."""

LOOKUPS = frozenset(
    ("embedding", "index", "index_select", "gather", "_embedding_bag", "_embedding_bag_forward_only", "take")
)


def product(op: Op) -> Value:
    """Return what is known of a product of the tensors that an operator is given.

    Args:
        op: the operator, with its factors alone.
    """
    notes = op.notes
    weights = [value for value in op.values if value.weights]
    others = [value for value in op.values if not value.weights]
    if weights and any(value.one_hot for value in others):
        for value in weights:
            notes.use(value.weights, Use.INDEXED)
        return Value(makers=frozenset(), made=True)
    if not weights:
        return _of_activations(op)
    if not others:
        own = [value for value in op.values if value.weights <= notes.layers]
        if len(own) != 1 or len(op.given) != 2:
            return _of_weights(op)
        weights, others = own, [evolve(NOTHING, makers=frozenset(), inner=True)]
        notes.use(next(value for value in op.values if value is not own[0]).weights, Use.ROWS)
        op = evolve(op, given=[(f, value if value is own[0] else others[0]) for f, value in op.given])
    params = frozenset[int]().union(*(value.weights for value in weights))
    is_convolution = "conv" in op.name
    fixed = not any(value.is_activation or value.zero for value in others)
    if not is_convolution and fixed and not params <= notes.layers:
        notes.use(params, Use.MIXED)  # a lookup, a rotation
        return Value(weights=params, made=True)
    if is_convolution and op.args[8] > 1 and op.args[8] == op.args[0].shape[1] and others[0] is op.values[0]:
        return _depthwise(op, params)
    chosen = len(weights) == 1 and any(
        value.soft and any(met in (Met.JOINED, Met.SCORED) for _, met in value.makers or ())
        for value in others
    )
    notes.use(params, Use.ATTENDED if chosen else Use.CONTRACTED)
    for value in others:
        notes.consume(value, by=params)
        _note_columns(notes, params, value)
    every = [
        _contracted(op, index, axes)
        for index, (factor, value) in enumerate(op.given)
        for axes in (value.every_axes if value.weights else ())
        if len(axes) == factor.dim()
    ]
    known = [axes for axes in every if axes is not None]
    return Value(
        makers=frozenset((param, Met.DIRECT) for param in params),
        inner=all(value.inner or not value.is_activation for value in others),
        axes=known[0] if known else None,
        also=tuple(known[1:]),
        made=True,
        product=True,
        sources=tuple(others),
    )


def _depthwise(op: Op, params: frozenset[int]) -> Value:
    """Return what is known after a filter of every channel by itself: the channels are those that were given."""
    op.notes.use(params, Use.DEPTHWISE)
    given, shape = op.values[0], op.result.shape
    kept = given.axes is not None and shape[1] == op.args[0].shape[1]
    axes = (*given.axes[:2], *map(blank, shape[2:])) if kept and given.axes else None
    return evolve(joined(op.notes, [given]), axes=axes)


def _of_activations(op: Op) -> Value:
    """Return what is known of a product of activations: of attention, or with a weight that layers made."""
    values = op.values
    _note_heads(op.notes, values)
    if sum(value.inner for value in values) != 1 and not any(map(_is_weight, values)):
        axes = weighed(op.result.shape) if any(value.soft for value in values) else None
        return evolve(joined(op.notes, values, in_product=True), axes=axes)
    for value in values:
        op.notes.consume(value)
    return Value(makers=frozenset(), made=True, product=True, sources=tuple(values))


def _is_weight(value: Value) -> bool:
    """Return whether a factor is a matrix that a layer made: both of its dimensions are features of one product."""
    if value.axes is None or len(value.axes) < 2:
        return False
    one, other = ({atom.param for atom in atoms} - {None} for atoms in value.axes[-2:])
    return bool(one & other)


def _of_weights(op: Op) -> Value:
    """Return what is known of a product of parameters alone: its rows are those of the left one."""
    left, right = op.values[0], op.values[-1]
    axes = None
    if len(op.given) == 2 and left.axes and right.axes:
        ins, outs = (-1, 0) if op.name == "linear" else (0, -1)
        axes = (*left.axes[:-1], right.axes[outs])
        _note(op.notes.inner, left.weights, left.axes[-1], left.axes[0])
        _note(op.notes.inner, right.weights, right.axes[ins], right.axes[outs])
    return Value(weights=left.weights | right.weights, rows=left.rows, axes=axes, made=True)


def _note(notes: defaultdict[int, set[Contraction]], params: Iterable[int], *some: tuple[Atom, ...]) -> None:
    """Note the dimensions of parameters that a product sums over, that became features, that count matrices."""
    for param in params:
        dims = [frozenset(atom.dim for atom in atoms if atom.param == param) for atoms in some]
        if any(dims):
            notes[param].add(Contraction(*dims, *[frozenset[int]()] * (3 - len(dims))))


def _contracted(op: Op, index: int, own: Axes) -> Axes | None:
    """Note which dimensions of a factor's parameter a product sums over; return the axes of the result."""
    axes: list[tuple[Atom, ...]] | None
    batch: tuple[Atom, ...] = ()
    made, (factor, value) = op.result, op.given[index]
    if "conv" in op.name:
        kernel = sum(own[2:], ())
        transposed = bool(op.args[6])
        ins, outs = (own[0], own[1] + kernel) if transposed else (own[1] + kernel, own[0])
        features = own[1 if transposed else 0]
        axes = [blank(made.shape[0]), features, *map(blank, made.shape[2:])] if op.args[8] == 1 else None
    elif factor.dim() == 1:
        ins, outs, axes = own[0], (), None
    else:
        by_row = op.name == "linear" or index == 0
        ins, outs, batch = own[-1 if by_row else -2], own[-2 if by_row else -1], sum(own[:-2], ())
        at = -2 if index == 0 and op.name != "linear" else -1
        axes = [blank(size) for size in made.shape]
        if len(axes) >= 2 and prod(atom.size for atom in outs) == made.shape[at]:
            axes[at] = outs
            if len(own) == 3 and len(axes) == 3:
                axes[0] = own[0] or axes[0]
    _note(op.notes.products, value.weights, ins, outs, batch)
    return None if axes is None else tuple(axes)


def _note_columns(notes: Notes, params: Iterable[int], value: Value) -> None:
    """Note that weights take heads of attention side by side, each of so many features."""
    heads = value.axes[-1] if value.axes else ()
    if len(heads) == 2 and all(atom.dim == WEIGHED for atom in heads):
        for param in params:
            notes.columns[param].add(heads[1].size)


def _note_heads(notes: Notes, values: Sequence[Value]) -> None:
    """Note the heads that factors of attention were shaped into: a run of features, beside others of the product."""
    for value in values:
        for dim in value.axes or ():
            for atom in dim if len(dim) == 1 else ():
                if atom.param is None or atom.stride != 1 or len(value.axes or ()) < 3:
                    continue
                parts = frozenset(part for part in value.parts if part[0].param == atom.param)
                notes.heads[atom.param].add((parts, atom.size))


def lookup(op: Op) -> Value:
    """Return what is known of rows that were looked up.

    Args:
        op: the operator: it is given a table, and then what indexes it.
    """
    (table, value), *keys = op.given
    if value.weights and table.dim() == 2:
        if any(key.is_activation for _, key in keys):
            op.notes.use(value.rows or value.weights, Use.INDEXED)
            return Value(makers=frozenset((param, Met.DIRECT) for param in value.projected), made=True)
        op.notes.use(value.rows, Use.PICKED)
    shape, axes, index = op.result.shape, None, op.arg(1, None)
    if value.is_activation and isinstance(index, list | tuple):  # which features it takes is not known here
        taken = [atoms for atoms, key in zip(value.axes or (), index, strict=False) if key is not None]
        op.notes.obscured |= {atom.param for atoms in taken for atom in atoms if atom.param is not None}
    lead = len(shape) - table.dim() + 1
    if value.axes is not None and len(value.axes) == table.dim() and shape[lead:] == table.shape[1:]:
        axes = (*map(blank, shape[:lead]), *value.axes[1:])  # rows, or one matrix of a stack for each
    kept = evolve(value, axes=axes, sources=tuple(op.values), parts=frozenset())
    return evolve(kept, zero=False, one_hot=False, summing=None)


def joined(notes: Notes, values: Sequence[Value], *, in_product: bool = False) -> Value:
    """Return the activation that several values make together.

    Args:
        notes: what the forward shows.
        values: the values.
        in_product: a product joins them.
    """
    makers = frozenset[tuple[int, Met]]().union(*(value.makers or frozenset() for value in values))
    makers |= {(param, Met.DIRECT) for value in values for param in value.projected}
    if in_product:
        for value in values:
            notes.take(value)
        if sum(bool(value.makers or value.weights) for value in values) > 1:
            scores = not any(value.soft for value in values) and all(met is Met.DIRECT for _, met in makers)
            makers = frozenset((param, Met.SCORED if scores else Met.JOINED) for param, _ in makers)
    flows = [value for value in values if value.is_activation]
    return Value(
        makers=makers,
        loose=frozenset[tuple[Run, int]]().union(*(value.loose for value in flows))
        if not in_product
        else frozenset(),
        inner=bool(flows) and all(value.inner for value in flows),
        made=any(value.made for value in values),
        sources=tuple(values),
    )
