"""Cutting activations into pieces, and the split that the pieces amount to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megaopt_roles.forward.pieces import Piece, Source
from megaopt_roles.forward.values import Flow

__all__ = [
    "are_gates",
    "bound",
    "find_heads",
    "find_split",
    "is_bounded",
    "is_covered",
    "lies_along",
    "merge",
    "note_axes",
    "note_heads",
    "numbered",
    "relabel",
]


def numbered(source: Source, leading: Sequence[int], trailing: Sequence[int] = ()) -> torch.Tensor:
    """Return a tensor `[*leading, rows, *trailing]` whose elements are row numbers.

    Args:
        source: whose rows.
        leading: dimensions before.
        trailing: dimensions after.
    """
    rows = torch.arange(source.size, dtype=torch.int32, device="cpu")
    rows = rows.view(*[1] * len(leading), -1, *[1] * len(trailing))
    return rows.expand(*leading, -1, *trailing).contiguous()


def relabel(tensor: torch.Tensor, origin: Flow) -> Flow:
    """Return what a shape operation made of an activation: the same piece, or one cut out of it.

    Args:
        tensor: the row numbers that are left.
        origin: the activation before.
    """
    piece = origin.piece
    if piece is None or tensor.numel() == 0:
        return Flow(origin.deps, tensor, None, one_hot=origin.one_hot, mixed=origin.mixed)
    if origin.tensor is not None and tensor.numel() == origin.tensor.numel():
        return Flow(origin.deps, tensor, piece)
    present = torch.zeros(piece.source.size, dtype=torch.bool, device="cpu")
    present[tensor.reshape(-1).long()] = True
    return Flow(origin.deps, tensor, piece.cut(tuple(present.nonzero().view(-1).tolist())))


def note_heads(before: Flow, after: torch.Tensor) -> None:
    """Note that an activation is shaped into heads: its rows lie in several dimensions then, a head in the last.

    A head that is shaped once more, as for a rotary embedding, stays one.

    Args:
        before: the activation.
        after: its row numbers in the new shape.
    """
    piece, tensor = before.piece, before.tensor
    if piece is None or tensor is None or piece.heads or not after.dim() or after.numel() != tensor.numel():
        return
    size, rows = after.shape[-1], len(piece.rows)
    whole = tensor.shape[-1] == rows or after.dim() == tensor.dim()
    if whole and 1 < size < rows and rows % size == 0:
        first = tuple(after.reshape(-1)[:size].tolist())
        if first == piece.rows[:size]:
            piece.heads = size


def note_axes(flow: Flow, moved: torch.Tensor) -> None:
    """Note that axes of an activation change places: where its last axis takes one row of each head, it had none.

    Heads that lie in the last axis of `view(..., size, heads)` come to light so.

    Args:
        flow: the activation before.
        moved: its row numbers after.
    """
    piece = flow.piece
    if piece is None or piece.heads <= 0 or not moved.numel() or moved.dim() < 2:
        return
    last = moved.reshape(-1, moved.shape[-1])[0].tolist()
    if len(last) > 1 and len({row // piece.heads for row in last}) == len(last):
        piece.heads = -1


def lies_along(flow: Flow, dim: Any) -> bool:
    """True where the rows of an activation change along a dimension: what sums over it mixes them.

    Args:
        flow: the activation.
        dim: the dimension; anything but a number counts as the last one.
    """
    tensor = flow.tensor
    if flow.piece is None or tensor is None or not tensor.dim() or not tensor.numel():
        return False
    at = dim if isinstance(dim, int) and -tensor.dim() <= dim < tensor.dim() else -1
    first = tensor.movedim(at, -1).reshape(-1, tensor.shape[at])[0]
    return bool((first != first[0]).any())


def find_heads(source: Source, split: tuple[int, ...]) -> tuple[int, ...]:
    """Return the rows of a head in each piece of a split, or in the only piece; empty where one is not known.

    Args:
        source: the rows of a projection, after an evaluation.
        split: what :func:`find_split` returned for it.
    """
    leaves = list(_leaves(source.root)) if split else [source.root]
    sizes = split or (source.size,)
    heads = tuple(_head(leaf, size, sum(sizes)) for leaf, size in zip(leaves, sizes, strict=True))
    return heads if all(heads) else ()


def _head(leaf: Piece, size: int, total: int) -> int:
    """Return the rows of a head in a piece that has `size` rows in every `total` of its source; 0 if not known."""
    for piece in _ancestors(leaf):
        if piece.heads < 0:
            return 0
        if piece.heads == total:  # every repetition of the pattern is a head, of which this piece has a part
            return size if size > 1 else 0
        if piece.heads and size % piece.heads == 0:
            return piece.heads
    return 0


def merge(flows: Iterable[Flow]) -> None:
    """Note that pieces, or mixes of them, are put side by side: what cut them apart did not separate matrices.

    That holds when all pieces of a cut come together again (the halves of a rotary embedding), not when some do
    (q, k and v on their way through one convolution, without the gate), or when they met before (shift and scale).

    Args:
        flows: the activations that meet.
    """
    below: dict[int, dict[int, Piece]] = {}
    parents: dict[int, Piece] = {}
    holders: dict[int, set[int]] = {}
    for at, flow in enumerate(flows):
        for piece in (ancestor for part in flow.pieces for ancestor in _ancestors(part)):
            if piece.parent is not None:
                parents[id(piece.parent)] = piece.parent
                holders.setdefault(id(piece.parent), set()).add(at)
                below.setdefault(id(piece.parent), {})[id(piece)] = piece
    for key, pieces in below.items():
        covered = set[int]().union(*(piece.rows for piece in pieces.values()))
        if len(pieces) > 1 < len(holders[key]) and len(covered) == len(parents[key].rows):
            parents[key].merged = True


def bound(flows: Iterable[Flow]) -> None:
    """Note that a sigmoid or a tanh is taken of activations.

    Args:
        flows: the activations.
    """
    for piece in (piece for flow in flows for piece in flow.pieces):
        piece.bounded = True


def is_bounded(piece: Piece) -> bool:
    """True for a piece of which a sigmoid or a tanh is taken, or of what it was cut from.

    Args:
        piece: some rows of a projection.
    """
    return any(part.bounded for part in _ancestors(piece))


def are_gates(source: Source) -> bool:
    """True where several pieces of a projection are bounded: gates of a recurrent cell.

    Of queries, keys and values one may be: the gate of what attention returns.

    Args:
        source: the rows of a projection, after an evaluation.
    """
    bounded = [leaf for leaf in _leaves(source.root) if any(piece.bounded for piece in _ancestors(leaf)[:-1])]
    return len(bounded) > 1


def find_split(source: Source) -> tuple[int, ...] | None:
    """Return the split sizes that the pieces of a source amount to.

    Args:
        source: the rows of a projection, after an evaluation.

    Returns:
        The sizes; an empty tuple when it is not split, or only into single rows, which are no matrices (steps of a
        loop over positions, at a wrong rank); None when it is split in a way that a view cannot describe.
    """
    leaves = list(_leaves(source.root))
    if len(leaves) < 2 or all(len(leaf.rows) == 1 for leaf in leaves):
        return ()
    parts = [torch.tensor(leaf.rows, dtype=torch.long, device="cpu") for leaf in leaves]
    if bool((torch.bincount(torch.cat(parts), minlength=source.size) != 1).any()):
        return None
    labels = torch.empty(source.size, dtype=torch.long, device="cpu")
    for label, rows in enumerate(parts):
        labels[rows] = label
    return _sizes(labels, len(leaves))


def is_covered(source: Source) -> bool:
    """True for a source whose pieces, together, are all of its rows.

    Args:
        source: the rows, after an evaluation.
    """
    return len(set[int]().union(*(piece.rows for piece in source.root.children.values()))) == source.size


def _ancestors(piece: Piece) -> list[Piece]:
    found = [piece]
    while found[-1].parent is not None:
        found.append(found[-1].parent)
    return found


def _leaves(piece: Piece) -> Iterator[Piece]:
    children = [] if piece.merged else list(piece.children.values())
    covered = set[int]().union(*(child.rows for child in children))
    if len(children) < 2 or (piece.parent is not None and len(covered) != len(piece.rows)):
        yield piece
        return
    for child in children:
        yield from _leaves(child)


def _sizes(labels: torch.Tensor, count: int) -> tuple[int, ...] | None:
    """Return the sizes of the parts that repeat; None where they do not, or where one part is in several places."""
    found, sizes = torch.unique_consecutive(labels, return_counts=True)
    runs = list(zip(found.tolist(), sizes.tolist(), strict=True))
    period = runs[:count]
    if len({label for label, _ in period}) != count or period * (len(runs) // count) != runs:
        return None
    return tuple(size for _, size in period)
