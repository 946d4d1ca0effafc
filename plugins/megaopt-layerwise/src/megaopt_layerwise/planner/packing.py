"""Longest processing time first: works go, the largest first, onto the rank with the least load."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from attrs import define, field

from megaopt_layerwise.planner.works import Work

__all__ = ["Loads", "pack"]


@define(eq=False)
class Loads:
    """What the ranks have so far.

    Args:
        ranks: how many there are.
    """

    ranks: int
    load: list[float] = field(init=False)
    bytes: list[float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.load = [0.0] * self.ranks
        self.bytes = [0.0] * self.ranks

    def key(self, rank: int) -> tuple[float, float, int]:
        """Return what ranks are compared by: load, then bytes, then number.

        Args:
            rank: the rank.
        """
        return self.load[rank], self.bytes[rank], rank


def pack(
    works: Iterable[Work],
    loads: Loads,
    *,
    by: Callable[[Work], float],
    most_memory: float | None = None,
) -> dict[str, int]:
    """Return an owner for every work, and add it to the loads.

    Args:
        works: what to share out.
        loads: what the ranks have already.
        by: the load of a work.
        most_memory: bytes of the fullest rank over their mean that no work may exceed where another rank has room;
            None: bytes do not matter.
    """
    ordered = sorted(works, key=lambda work: (-by(work), -work.state_bytes, work.name))
    total = sum(loads.bytes) + sum(work.state_bytes for work in ordered)
    room = float("inf") if most_memory is None else most_memory * total / loads.ranks
    queues: dict[tuple[int, ...] | None, list[tuple[float, float, int]]] = {}
    owner = {}
    for work in ordered:
        if work.ranks not in queues:
            able = range(loads.ranks) if work.ranks is None else work.ranks
            queues[work.ranks] = [loads.key(rank) for rank in able]
            heapq.heapify(queues[work.ranks])
        rank = _least(queues[work.ranks], loads, work, room)
        loads.load[rank] += by(work)
        loads.bytes[rank] += work.state_bytes
        heapq.heappush(queues[work.ranks], loads.key(rank))
        owner[work.name] = rank
    return owner


def _least(queue: list[tuple[float, float, int]], loads: Loads, work: Work, room: float) -> int:
    """Take the least loaded rank with room for a work out of its queue; where none has room, the emptiest one.

    Loads only grow, so an entry that is out of date comes too early, and is put back where it belongs.
    """
    full: list[tuple[float, float, int]] = []
    found = None
    while queue and found is None:
        entry = heapq.heappop(queue)
        rank = entry[2]
        if entry != loads.key(rank):
            heapq.heappush(queue, loads.key(rank))
        elif loads.bytes[rank] and loads.bytes[rank] + work.state_bytes > room:
            full.append(entry)
        else:
            found = rank
    if found is None:
        entry = min(full, key=lambda entry: (entry[1], entry[0], entry[2]))
        full.remove(entry)
        found = entry[2]
    for entry in full:
        heapq.heappush(queue, entry)
    return found
