"""Which part of a matrix each of its owners steps, and which it has in memory: pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megaopt_core.params import Box, ParamSpec
from megaopt_layerwise.planner import Division, Owners, peer_dim

__all__ = ["chunk", "memory_box", "memory_shares", "owners_in", "stepped_box"]


def chunk(extent: int, count: int, index: int) -> tuple[int, int]:
    """Return `[first, last)` of one of several parts of a dimension, which are as equal as they can be.

    Args:
        extent: its length.
        count: how many parts there are.
        index: which of them.

    Example:
        >>> [chunk(10, 4, index) for index in range(4)]
        [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    return extent * index // count, extent * (index + 1) // count


def _rows(rows: int, owners: Owners, index: int) -> tuple[int, int]:
    """Return `[first, last)` of the rows that an owner has in memory."""
    if owners.division is Division.MATRICES:
        return owners.bounds[index], owners.bounds[index + 1]
    return chunk(rows, len(owners.ranks), index)


def memory_shares(shape: Sequence[int], owners: Owners) -> list[tuple[int, int]]:
    """Return `(rank, elements)` of what every owner has in memory, row by row: rows, or matrices of a batch.

    Args:
        shape: of the tensor as its ranks hold it.
        owners: who steps it.

    Example:
        >>> memory_shares((6, 4), Owners((2, 3), Division.PEERS)), memory_shares((6, 4), Owners((1,)))
        ([(2, 12), (3, 12)], [(1, 24)])
    """
    if len(owners.ranks) == 1:
        return [(owners.ranks[0], math.prod(shape))]
    numel = math.prod(shape[1:])
    found = []
    for index, rank in enumerate(owners.ranks):
        first, last = _rows(shape[0], owners, index)
        found.append((rank, (last - first) * numel))
    return found


def stepped_box(spec: ParamSpec, box: Box, owners: Owners, index: int) -> Box:
    """Return what one of the owners steps: all of it, matrices of a batch, or the part of a peer.

    Args:
        spec: the parameter.
        box: which part of the logical tensor its ranks hold.
        owners: who steps it.
        index: which of them.
    """
    if owners.division is Division.WHOLE:
        return box
    dim = peer_dim(spec) if owners.division is Division.PEERS else 0
    return _narrowed(box, dim or 0, owners, index)


def memory_box(box: Box, owners: Owners, index: int) -> Box:
    """Return the rows that one of the owners has in memory.

    Args:
        box: which part of the logical tensor its ranks hold.
        owners: who steps it.
        index: which of them.
    """
    return box if owners.division is Division.WHOLE else _narrowed(box, 0, owners, index)


def _narrowed(box: Box, dim: int, owners: Owners, index: int) -> Box:
    offsets, sizes = list(box[0]), list(box[1])
    first, last = _rows(sizes[dim], owners, index)
    offsets[dim], sizes[dim] = offsets[dim] + first, last - first
    return tuple(offsets), tuple(sizes)


def owners_in(spec: ParamSpec, begin: int, end: int, start: int, ends: Sequence[int]) -> Owners | None:
    """Return the owners of a tensor that lies in a bucket; None where the shares cut it as no plan does.

    Args:
        spec: the parameter.
        begin: where it begins in the buffer.
        end: where it ends.
        start: where the bucket begins.
        ends: where each rank's share of the bucket ends.

    Example:
        >>> import torch
        >>> from megaopt_core.params import MATRIX, Granularity
        >>> tensor = Granularity.TENSOR
        >>> spec = ParamSpec(
        ...     "w", (4, 4), torch.float32, torch.float32, "any", 0, tensor, 5.0, view=MATRIX, takes_peers=True
        ... )
        >>> owners_in(spec, 0, 16, 0, (8, 16)).division, owners_in(spec, 0, 16, 0, (10, 16))
        (<Division.PEERS: 'peers'>, None)
    """
    bounds = zip((start, *ends), ends, strict=False)
    parts = [
        (rank, max(low, begin), min(high, end))
        for rank, (low, high) in enumerate(bounds)
        if max(low, begin) < min(high, end)
    ]
    ranks = tuple(rank for rank, _, _ in parts)
    if len(ranks) < 2:
        inside = start <= begin and end <= ends[-1]
        return Owners(ranks or (_last_before(begin, ends),)) if inside else None
    row = math.prod(spec.shape[1:])
    if not spec.takes_peers or (end - begin) % row:
        return None
    found = Owners(ranks, Division.PEERS)
    if spec.view is not None and spec.view.batch_dims:
        cuts = [(low - begin) // row for _, low, _ in parts]
        found = Owners(ranks, Division.MATRICES, (*cuts, (end - begin) // row))
    elif peer_dim(spec) is None or not _is_block(ranks, len(ends)):
        return None
    expected = memory_shares(((end - begin) // row, row), found)
    return found if expected == [(rank, high - low) for rank, low, high in parts] else None


def _last_before(begin: int, ends: Sequence[int]) -> int:
    """Return the rank in whose share a tensor without elements lies."""
    return next((rank for rank, stop in enumerate(ends) if begin < stop), len(ends) - 1)


def _is_block(ranks: Sequence[int], of: int) -> bool:
    """Return whether ranks are one of the equal consecutive blocks that peers stand in."""
    size, first = len(ranks), ranks[0]
    return tuple(ranks) == tuple(range(first, first + size)) and not (of % size or first % size)
