"""Operators that work entry by entry, on weights alone or on activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import torch
from attrs import evolve

from megaopt_roles.watch._notes import Notes, Use
from megaopt_roles.watch._op import Op
from megaopt_roles.watch._products import joined
from megaopt_roles.watch._values import Axes, Met, Run, Value, blank

__all__ = ["by_entries", "weights_by_entries"]

type Given = Sequence[tuple[torch.Tensor, Value]]

_NONLINEAR = frozenset((
    "relu", "gelu", "silu", "sin", "cos", "tanh", "sigmoid", "_softmax", "native_layer_norm",
    "leaky_relu", "elu", "softplus", "hardtanh", "_fused_rms_norm", "glu", "mish", "hardswish", "erf",
))  # fmt: skip
_SUMS = frozenset(("add", "sub", "cat", "stack", "addcmul"))
_TOKENS = frozenset((
    "cat", "stack", "where", "copy", "index_put", "scatter", "slice_scatter", "add", "sub", "rsub",
    "lerp", "masked_fill",
))  # fmt: skip


def weights_by_entries(op: Op) -> Value:
    """Return what is known of parameters, and perhaps constants, that an operator joins by entries.

    Args:
        op: the operator.
    """
    notes, values, name = op.notes, op.values, op.name
    weights = frozenset[int]().union(*(value.weights for value in values))
    if name in _NONLINEAR and any(value.projected for value in values):
        for value in values:
            notes.become_rows(value)
        return joined(notes, values)
    if name == "repeat":
        notes.use(weights, Use.EXPANDED)
    made = op.result.numel()
    holders = [value for tensor, value in op.given if value.weights and tensor.numel() == made]
    for tensor, value in op.given:
        smaller = tensor.numel() < made and bool(holders) and value not in holders
        scale = value.noisy and name in ("add", "sub") and any(h.weights and not h.noisy for h in holders)
        if value.weights and (smaller or scale):
            gains = value.weights - frozenset[int]().union(*(h.weights for h in holders if h is not value))
            notes.use(gains, Use.ENTRIES)
            weights -= gains
    fixed = name == "mul" and any(not value.weights and tensor.numel() > 1 for tensor, value in op.given)
    axes, also = _axes([pair for pair in op.given if pair[1].weights & weights], op.result)
    return Value(
        weights=weights,
        also=also,
        rows=frozenset[int]().union(*(value.rows for value in values)) & weights,
        axes=axes,
        noisy=fixed,
        made=True,
        zero=not weights and all(value.zero for value in values),
    )


def by_entries(op: Op) -> Value:
    """Return what is known of an activation that an operator makes of others by entries, and note what weights meet.

    Args:
        op: the operator.
    """
    notes, flows, name = op.notes, op.flows, op.name
    value = joined(notes, flows)
    axes, also = _axes([pair for pair in op.given if pair[1].is_activation], op.result)
    value = evolve(value, normed=_is_normed(name, flows))
    value, summing = _with_weights(op, value)
    if name in ("sum", "mean") and flows[0].summing is not None:
        done = _summed(op, flows[0].summing)
        if done is not None:
            return done
    if name == "sum" and _dims(op) == {op.given[0][0].dim() - 1}:  # an inner product
        value = evolve(value, makers=_met_as(value, {Met.GATED: Met.SCORED}))
    if name in ("_softmax", "_safe_softmax"):
        _note_choice(op, axes, value)
        return evolve(value, makers=_met_as(value, {Met.SCORED: Met.JOINED}), axes=axes, soft=True)
    for flow in flows:
        notes.take(flow)
    _note_rejoined(notes, name, flows)
    if len(flows) > 1 and name in ("mul", "div"):
        value = _gated(value, flows[0], flows[1])
    if len(flows) > 1 and name in ("add", "sub", "stack"):
        _note_stream(notes, flows)
    if summing is not None:
        notes.use(summing[0], Use.SUMMED)
    if name == "cat":
        return _laid_beside(op, value)
    sums = name in ("sum", "mean")
    return evolve(
        value,
        axes=None if sums or name == "stack" else axes,
        loose=frozenset() if sums else value.loose,
        also=also if name in ("add", "sub", "rsub") else (),
        parts=_parts(name, flows),
        summing=summing,
        one_hot=_is_one_hot(op, flows),
        soft=len(flows) == 1 and flows[0].soft,
    )


def _is_one_hot(op: Op, flows: Sequence[Value]) -> bool:
    """Return whether a result is a one-hot code: ids that are compared, or set in zeros, or such a code as it was."""
    weights = any(value.weights for value in op.values)
    if len(flows) == 1 and flows[0].one_hot and len(op.given) - weights == 1:
        return True
    fills = op.name in ("scatter", "index_put") and op.values[0].zero
    return (fills or op.name in ("eq", "one_hot")) and not any(flow.makers for flow in flows)


def _met_as(value: Value, changes: Mapping[Met, Met]) -> frozenset[tuple[int, Met]]:
    """Return the makers of a value with some ways of meeting them in the place of others."""
    return frozenset((param, changes.get(met, met)) for param, met in value.makers or ())


def _axes(given: Given, made: torch.Tensor) -> tuple[Axes | None, tuple[Axes, ...]]:
    """Return the axes of a result: of the first whose features are known, and of the others."""
    every = [
        axes
        for tensor, value in given
        for axes in value.every_axes
        if tensor.dim() == made.dim()
        and (tensor.shape == made.shape or _is_known(axes))
        and all(prod(atom.size for atom in dim) == size for dim, size in zip(axes, made.shape, strict=False))
    ]
    every.sort(key=lambda axes: not _is_known(axes))
    known = [axes for axes in dict.fromkeys(every[1:]) if _is_known(axes)]
    return (every[0], tuple(axes for axes in known if axes != every[0])[:4]) if every else (None, ())


def _is_known(axes: Axes) -> bool:
    return any(atom.param is not None for dim in axes for atom in dim)


def _laid_beside(op: Op, value: Value) -> Value:
    """Return what tensors make side by side: their features keep their axes where these are not what is joined."""
    made = op.result
    dim = op.arg(1, 0) % made.dim()
    every = [
        (*axes[:dim], blank(made.shape[dim]), *axes[dim + 1 :])
        for own in op.values
        for axes in own.every_axes
        if len(axes) == made.dim() and not any(atom.param is not None for atom in axes[dim])
    ]
    axes = every[0] if every else None
    return evolve(value, axes=axes, also=tuple(every[1:5]), parts=_parts("cat", op.flows))


type Summing = tuple[frozenset[int], frozenset[int], frozenset[int]]


def _with_weights(op: Op, value: Value) -> tuple[Value, Summing | None]:
    """Note what weights do to activations, and which of them a sum would contract."""
    summing: Summing | None = None
    dims = op.result.dim()
    for tensor, own in op.given:
        if not own.weights:
            continue
        if op.name == "mul" and own.axes and tensor.dim() <= dims:
            other = next(t for t, v in op.given if v.is_activation)
            xs, ws = ((1,) * (dims - t.dim()) + tuple(t.shape) for t in (other, tensor))
            outs = [dim for dim in range(dims) if xs[dim] == 1 and ws[dim] > 1]
            ins = [dim for dim in range(dims) if xs[dim] > 1 and ws[dim] > 1]
            if outs and ins:
                summing = (own.weights, frozenset(ins), value.made_by)
                continue
        if op.name in _TOKENS:
            op.notes.become_rows(own)
            makers = (value.makers or frozenset()) | {(param, Met.DIRECT) for param in own.projected}
            value = evolve(value, makers=makers)
            continue
        op.notes.use(own.weights, Use.ENTRIES)
        normed = "norm" in op.name or (op.name in ("mul", "div") and value.normed)
        if tensor.numel() > 1 and normed:
            value = evolve(value, makers=_met_as(value, {Met.DIRECT: Met.SCALED}))
    return value, summing


def _summed(op: Op, summing: Summing) -> Value | None:
    """Return what is known of a sum after a product by entries, where it makes a matrix product of both."""
    weights, ins, before = summing
    if not _dims(op) & ins:
        return None
    op.notes.use(weights, Use.CONTRACTED)
    op.notes.consumed |= before - weights
    makers = frozenset((param, Met.DIRECT) for param in weights)
    return Value(makers=makers, made=True, sources=tuple(op.flows))


def _dims(op: Op) -> set[int]:
    """Return the dimensions that a sum runs over."""
    dims = op.given[0][0].dim()
    over = op.arg(1, ())
    return {dim % dims for dim in ([over] if isinstance(over, int) else over or range(dims))}


def _note_choice(op: Op, axes: Axes | None, value: Value) -> None:
    """Note the weights among whose rows a softmax chooses: those of a product that it does not run over."""
    notes, makers = op.notes, value.makers or ()
    direct = {p for p, met in makers if met is Met.DIRECT and Use.CONTRACTED in notes.uses[p]}
    if any(met in (Met.SCORED, Met.JOINED) for _, met in makers):
        notes.use(direct, Use.SCORING)
    if axes is None:
        notes.use(direct, Use.CHOSEN)
        return
    dim = op.args[1] % max(len(axes), 1)
    own = {atom.param for atom in axes[dim]} if axes else set()
    rows = {atom.param for at, atoms in enumerate(axes) if at != dim for atom in atoms}
    notes.use(direct & rows - own, Use.CHOSEN)


def _note_rejoined(notes: Notes, name: str, flows: Sequence[Value]) -> None:
    if name not in _SUMS:
        return
    groups: defaultdict[Run, set[int]] = defaultdict(set)
    for flow in flows:
        for run, begin in flow.parts:
            groups[run].add(begin)
    notes.rejoined |= {run for run, begins in groups.items() if len(begins) > 1}
    if name == "cat":  # one part as it was, another changed, as in a coupling of flows
        for run, _ in flows[0].loose:
            firsts = [tuple(begin for other, begin in flow.loose if other == run) for flow in flows]
            if all(len(own) == 1 for own in firsts) and {(b,) for b, _ in notes.cuts[run]} == set(firsts):
                notes.rejoined.add(run)


def _is_normed(name: str, flows: Sequence[Value]) -> bool:
    """Return whether an activation is divided by something of itself, or was."""
    if len(flows) == 1:
        return flows[0].normed
    return name in ("mul", "div") and bool(flows[0].made_by) and flows[0].made_by == flows[1].made_by


def _parts(name: str, flows: Sequence[Value]) -> frozenset[tuple[Run, int]]:
    if len(flows) == 1:
        return flows[0].parts if name in ("mul", "neg", "div", "cat", "stack") else frozenset()
    if name in ("add", "sub", "cat", "stack"):
        return frozenset[tuple[Run, int]]().union(*(flow.parts for flow in flows))
    return frozenset()


def _gated(value: Value, one: Value, other: Value) -> Value:
    """Return a product by entries of two activations: what both make is a gate of the other."""
    if not one.made_by or not other.made_by or one.made_by <= other.made_by or other.made_by <= one.made_by:
        return value
    return evolve(value, makers=_met_as(value, {Met.DIRECT: Met.GATED}))


def _note_stream(notes: Notes, flows: Sequence[Value]) -> None:
    """Note what a sum, or a join, puts back into a stream that it was computed from: it is inside a block."""
    for stream, branch in ((flows[0], flows[-1]), (flows[-1], flows[0])):
        root = stream
        while True:
            before = [value for value in root.sources if value.is_activation]
            if len(before) != 1 or before[0].makers != root.makers or root.parts - before[0].parts:
                break
            root = before[0]
        if not root.made:
            continue
        added = branch.made_by - stream.made_by
        if added:
            notes.add_to_stream(_computed_from(root, branch, added))


def _computed_from(root: Value, branch: Value, added: frozenset[int]) -> set[int]:
    """Return which parameters have products in a branch that were computed from a value."""
    found, ends = set[int](), [value for value in _behind(branch, root.at) if value.product]
    for end in ends:
        if (
            end is not root
            and end.made_by & added - found
            and any(v.at == root.at for v in _behind(end, root.at))
        ):
            found |= end.made_by & added
    return found


def _behind(value: Value, at: int) -> Iterator[Value]:
    """Yield a value and those that it was computed from, as far back as a time."""
    seen, todo = set[int](), [value]
    while todo:
        value = todo.pop()
        if value.at in seen or value.at < at:
            continue
        seen.add(value.at)
        yield value
        todo.extend(value.sources)
