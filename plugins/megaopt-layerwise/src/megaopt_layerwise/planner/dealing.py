"""Owners without a layout: forwards and backwards over the ranks, in the order of sizes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["ping_pong"]


def ping_pong(numels: Sequence[int], ranks: int) -> list[list[int]]:
    """Return which positions each rank owns: sorted by elements, dealt forwards and backwards in turn.

    Args:
        numels: elements of each parameter; equal ones keep their order.
        ranks: number of ranks.

    Returns:
        Positions in `numels`, one list a rank, smallest first.

    Example:
        >>> ping_pong([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 4)
        [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]
    """
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for turn, position in enumerate(sorted(range(len(numels)), key=lambda at: (numels[at], at))):
        lap, place = divmod(turn, ranks)
        owned[ranks - 1 - place if lap % 2 else place].append(position)
    return owned
