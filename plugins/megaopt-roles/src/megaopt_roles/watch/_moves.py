"""Views, copies and cuts: the axes of a tensor follow them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.watch._notes import Notes, Use
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


def moved(
    notes: Notes, name: str, args: Sequence[Any], tensor: torch.Tensor, value: Value, made: list[torch.Tensor]
) -> Value | list[Value]:
    """Return what is known after a view, a copy or a cut; a list where several tensors are made.

    Args:
        notes: what the forward shows.
        name: of the operator.
        args: its arguments.
        tensor: what is moved.
        value: what is known of it.
        made: the results.
    """
    if value.weights and name == "expand" and made[0].numel() > tensor.numel():
        notes.use(value.weights, Use.EXPANDED)
        if value.projected:
            notes.become_rows(value)
            makers = frozenset((param, Met.DIRECT) for param in value.projected)
            return Value(makers=makers, made=True, sources=(value,))
    every = [axes for axes in value.every_axes if len(axes) == tensor.dim()]
    kept = evolve(value, axes=None, also=(), sources=(value,), summing=None, product=False)
    if name not in CUTS:
        first, *also = [_moved(axes, name, args, tensor, made[0]) for axes in every] or [None]
        return evolve(kept, axes=first, also=tuple(filter(None, also)))
    values = [kept] * len(made)
    for axes in every:
        for index, (new, parts) in enumerate(_cut(notes, name, args, tensor, value, axes, made)):
            before = values[index]
            values[index] = evolve(
                before,
                axes=new if before.axes is None else before.axes,
                also=(*before.also, *(() if before.axes is None or new is None else (new,))),
                parts=before.parts | parts if value.is_activation and name != "glu" else frozenset(),
                loose=before.loose | parts if value.is_activation and name != "glu" else frozenset(),
            )
    return values if len(made) > 1 else values[0]


def _moved(
    axes: Axes, name: str, args: Sequence[Any], tensor: torch.Tensor, made: torch.Tensor
) -> Axes | None:
    """Return the axes after a view or a copy."""
    if name == "t":
        return axes[::-1]
    if name == "transpose":
        order = list(range(tensor.dim()))
        one, other = args[1] % tensor.dim(), args[2] % tensor.dim()
        order[one], order[other] = other, one
        return tuple(axes[dim] for dim in order)
    if name == "permute":
        return tuple(axes[dim % tensor.dim()] for dim in args[1])
    if name == "expand":
        lead = made.dim() - tensor.dim()
        new = [blank(size) for size in made.shape]
        for dim, atoms in enumerate(axes):
            if tensor.shape[dim] == made.shape[lead + dim]:
                new[lead + dim] = atoms
        return tuple(new)
    return axes if tensor.shape == made.shape else reshaped(axes, made.shape)


def _pieces(
    name: str, args: Sequence[Any], tensor: torch.Tensor, made: list[torch.Tensor]
) -> tuple[int, list[tuple[int, int]], int]:
    """Return along which dimension a tensor is cut, where each piece begins with its length, and the step of it."""
    at = {"select": 1, "slice": 1, "unbind": 1, "glu": 1}.get(name, 2)
    default = -1 if name == "glu" else 0
    dim = (args[at] if len(args) > at else default) % tensor.dim()
    size = tensor.shape[dim]
    if name == "glu":
        return dim, [(0, size // 2), (size // 2, size // 2)], 1
    if name in ("select", "slice"):
        begin = args[2] if len(args) > 2 and args[2] is not None else 0
        begin = min(max(begin + size if begin < 0 else begin, 0), size)
        step = args[4] if name == "slice" and len(args) > 4 else 1
        return dim, [(begin, 1 if name == "select" else made[0].shape[dim])], step
    lengths = [1 if name == "unbind" else part.shape[dim] for part in made]
    return dim, [(sum(lengths[:index]), length) for index, length in enumerate(lengths)], 1


def _cut(
    notes: Notes,
    name: str,
    args: Sequence[Any],
    tensor: torch.Tensor,
    value: Value,
    axes: Axes,
    made: list[torch.Tensor],
) -> list[tuple[Axes | None, frozenset[tuple[Run, int]]]]:
    """Note what a cut takes apart; return the axes of every piece, and which part it is."""
    dim, pieces, step = _pieces(name, args, tensor, made)
    size, atom = tensor.shape[dim], merged(axes[dim])
    outer: tuple[Atom, ...] = ()
    inner: tuple[Atom, ...] = ()
    unit = 1
    if step > 1:  # every second index, or third: one of each group is taken
        if size % step or pieces[0][0] >= step or atom is None or pieces[0][1] * step != size:
            return [(None, frozenset())]
        outer = (atom._replace(stride=atom.stride * step, size=size // step),) if size > step else ()
        pieces, atom, size = [(pieces[0][0], 1)], atom._replace(size=step), step
    elif atom is None and axes[dim]:  # the outermost of several runs may be what is cut
        unit = size // axes[dim][0].size
        if any(begin % unit or length % unit for begin, length in pieces):
            unit = 1
        else:
            atom, inner, size = axes[dim][0], axes[dim][1:], size // unit
    found: list[tuple[Axes | None, frozenset[tuple[Run, int]]]] = []
    for begin, length in ((begin // unit, length // unit) for begin, length in pieces):
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
        dropped = name in ("select", "unbind")
        found.append(((*axes[:dim], *(() if dropped else (own,)), *axes[dim + 1 :]), parts))
    return found[:1] if name == "glu" else found
