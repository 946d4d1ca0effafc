"""Views, copies and cuts: the axes of a tensor follow them."""

from __future__ import annotations

from itertools import accumulate

from attrs import evolve

from megaopt_roles.watch._notes import Use
from megaopt_roles.watch._op import Op
from megaopt_roles.watch._values import Atom, Axes, Met, Run, Value, blank, merged, reshaped

__all__ = ["CUTS", "MOVES", "moved"]

CUTS = frozenset((
    "slice", "select", "split", "split_with_sizes", "unbind", "glu", "unsafe_split",
    "unsafe_split_with_sizes",
))  # fmt: skip
MOVES = CUTS | frozenset((
    "view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand", "clone", "_to_copy",
    "detach", "alias", "lift_fresh", "t", "transpose", "permute", "neg", "native_dropout",
))  # fmt: skip
"""Operators that move entries, or scale all of them alike."""


def moved(op: Op) -> Value | list[Value]:
    """Return what is known after a view, a copy or a cut; a list where several tensors are made.

    Args:
        op: the operator.
    """
    (tensor, value), *_ = op.given
    if value.weights and op.name == "expand" and op.result.numel() > tensor.numel():
        op.notes.use(value.weights, Use.EXPANDED)
        if value.projected:
            op.notes.become_rows(value)
            makers = frozenset((param, Met.DIRECT) for param in value.projected)
            return Value(makers=makers, made=True, sources=(value,))
    every = [axes for axes in value.every_axes if len(axes) == tensor.dim()]
    kept = evolve(value, axes=None, also=(), sources=(value,), summing=None, product=False)
    if op.name not in CUTS:
        first, *also = [_moved(op, axes) for axes in every] or [None]
        return evolve(kept, axes=first, also=tuple(filter(None, also)))
    values = [kept] * len(op.made)
    for axes in every:
        for index, (new, parts) in enumerate(_cut(op, axes)):
            before = values[index]
            cut = parts if value.is_activation and op.name != "glu" else frozenset()
            values[index] = evolve(
                before,
                axes=new if before.axes is None else before.axes,
                also=(*before.also, *(() if before.axes is None or new is None else (new,))),
                parts=before.parts | cut,
                loose=before.loose | cut,
            )
    return values if len(op.made) > 1 else values[0]


def _moved(op: Op, axes: Axes) -> Axes | None:
    """Return the axes after a view or a copy."""
    dims, shape = len(axes), op.result.shape
    if op.name == "t":
        return axes[::-1]
    if op.name in ("transpose", "permute"):
        order = list(range(dims))
        if op.name == "permute":
            order = [dim % dims for dim in op.args[1]]
        else:
            one, other = op.args[1] % dims, op.args[2] % dims
            order[one], order[other] = other, one
        return tuple(axes[dim] for dim in order)
    before = op.given[0][0].shape
    if op.name == "expand":
        lead = len(shape) - dims
        kept = [atoms if before[dim] == shape[lead + dim] else None for dim, atoms in enumerate(axes)]
        found = [*[None] * lead, *kept]
        return tuple(blank(n) if own is None else own for n, own in zip(shape, found, strict=True))
    return axes if before == shape else reshaped(axes, shape)


def _pieces(op: Op) -> tuple[int, list[tuple[int, int]], int]:
    """Return along which dimension a tensor is cut, where each piece begins with its length, and the step of it."""
    tensor, name = op.given[0][0], op.name
    at = {"select": 1, "slice": 1, "unbind": 1, "glu": 1}.get(name, 2)
    dim = op.arg(at, -1 if name == "glu" else 0) % tensor.dim()
    size = tensor.shape[dim]
    if name == "glu":
        return dim, [(0, size // 2), (size // 2, size // 2)], 1
    if name in ("select", "slice"):
        begin = op.arg(2, 0)
        begin = min(max(begin + size if begin < 0 else begin, 0), size)
        return dim, [(begin, 1 if name == "select" else op.result.shape[dim])], op.arg(4, 1)
    lengths = [1 if name == "unbind" else part.shape[dim] for part in op.made]
    return dim, list(zip([0, *accumulate(lengths)], lengths, strict=False)), 1


def _cut(op: Op, axes: Axes) -> list[tuple[Axes | None, frozenset[tuple[Run, int]]]]:
    """Note what a cut takes apart; return the axes of every piece, and which part it is."""
    notes, (tensor, value) = op.notes, op.given[0]
    dim, pieces, step = _pieces(op)
    size, atom = tensor.shape[dim], merged(axes[dim])
    outer: tuple[Atom, ...] = ()
    inner: tuple[Atom, ...] = ()
    if step > 1:  # every second index, or third: one of each group is taken
        if size % step or pieces[0][0] >= step or atom is None or pieces[0][1] * step != size:
            return [(None, frozenset())]
        outer = (atom._replace(stride=atom.stride * step, size=size // step),) if size > step else ()
        pieces, atom, size = [(pieces[0][0], 1)], atom._replace(size=step), step
    elif atom is None and axes[dim]:  # the outermost of several runs may be what is cut
        unit = size // axes[dim][0].size
        if not any(begin % unit or length % unit for begin, length in pieces):
            atom, inner, size = axes[dim][0], axes[dim][1:], size // unit
            pieces = [(begin // unit, length // unit) for begin, length in pieces]
    found: list[tuple[Axes | None, frozenset[tuple[Run, int]]]] = []
    for begin, length in pieces:
        parts, own = frozenset[tuple[Run, int]](), blank(length)
        if length == size:
            own = axes[dim] if not outer else (*outer, *own)
        elif atom is not None and atom.param is not None:
            run = Run(atom.param, atom.dim, atom.first, atom.size, atom.stride)
            notes.cuts[run].add((begin, length))
            notes.cut_from[run].add(value.root)
            if value.weights:
                notes.cut_inside.add(run)
            parts = frozenset({(run, begin)})
            first = atom.first + begin * atom.stride
            own = (atom._replace(size=length, first=first),) if length > 1 else ()
            own = (*outer, *own, *inner)
        kept = () if op.name in ("select", "unbind") else (own,)
        found.append(((*axes[:dim], *kept, *axes[dim + 1 :]), parts))
    return found[:1] if op.name == "glu" else found
