"""Which pieces make up a share of an optimizer's bytes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["batches_of", "nearest_share"]


def nearest_share(sizes: Sequence[int], fraction: float) -> frozenset[int]:
    """Return the positions of whole pieces, largest first, that together come near a fraction of all bytes.

    A piece is taken if the sum is then nearer to the fraction than without it, so that one large piece is all or
    nothing. Pieces of one size are taken in their order.

    Args:
        sizes: bytes of each piece.
        fraction: from 0 to 1.

    Example:
        >>> sorted(nearest_share([100, 300, 200], 0.5))
        [1]
        >>> sorted(nearest_share([100, 300, 200], 1.0))
        [0, 1, 2]
    """
    wanted, taken, chosen = fraction * sum(sizes), 0.0, set()
    for index in sorted(range(len(sizes)), key=lambda at: -sizes[at]):
        if taken + sizes[index] / 2 <= wanted:
            chosen.add(index)
            taken += sizes[index]
    return frozenset(chosen)


def batches_of(indices: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Return consecutive pieces that have at most `limit` bytes together; a larger one is a batch of its own.

    Args:
        indices: positions of pieces.
        sizes: bytes of every piece, by position.
        limit: bytes.

    Example:
        >>> batches_of([0, 1, 2], [4, 4, 9], 8)
        [[0, 1], [2]]
    """
    batches: list[list[int]] = []
    held = 0
    for index in indices:
        if not batches or held + sizes[index] > limit:
            batches.append([])
            held = 0
        batches[-1].append(index)
        held += sizes[index]
    return batches
