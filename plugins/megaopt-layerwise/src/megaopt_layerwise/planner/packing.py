"""Longest processing time first: units go, the largest first, onto the rank with the least load."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from attrs import define, field

from megaopt_layerwise.planner.units import Unit
from megaopt_layerwise.planner.works import Carried

__all__ = ["Loads", "pack"]


@define(eq=False)
class Loads:
    """What the ranks have so far.

    Args:
        ranks: how many there are.
        room: bytes of state that no unit may take a rank beyond while another one has room.
        carried: what they have before anything is packed; None: nothing.
    """

    ranks: int
    room: float = math.inf
    carried: Carried | None = None
    load: list[float] = field(init=False)
    bytes: list[float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.load = [0.0] * self.ranks if self.carried is None else list(self.carried.costs)
        self.bytes = [0.0] * self.ranks if self.carried is None else list(self.carried.state_bytes)

    def key(self, rank: int) -> tuple[float, float, int]:
        """Return what ranks are compared by: load, then bytes, then number.

        Args:
            rank: the rank.
        """
        return self.load[rank], self.bytes[rank], rank


def pack(units: Sequence[Unit], loads: Loads) -> list[int]:
    """Return an owner for every unit, and add it to the loads.

    Args:
        units: what to share out.
        loads: what the ranks have already.
    """
    order = sorted(range(len(units)), key=lambda at: _largest_first(units[at]))
    queues: dict[tuple[int, ...] | None, list[tuple[float, float, int]]] = {}
    owners = [0] * len(units)
    for at in order:
        unit = units[at]
        if unit.ranks not in queues:
            able = range(loads.ranks) if unit.ranks is None else unit.ranks
            queues[unit.ranks] = [loads.key(rank) for rank in able]
            heapq.heapify(queues[unit.ranks])
        rank = _least(queues[unit.ranks], loads, unit)
        loads.load[rank] += unit.load
        loads.bytes[rank] += unit.bytes
        heapq.heappush(queues[unit.ranks], loads.key(rank))
        owners[at] = rank
    return owners


def _largest_first(unit: Unit) -> tuple[float, float, str]:
    """Return what units are sorted by; the name makes the order that of no argument."""
    return -unit.load, -unit.bytes, unit.name


def _least(queue: list[tuple[float, float, int]], loads: Loads, unit: Unit) -> int:
    """Take the least loaded rank with room for a unit out of its queue; where none has room, the emptiest one.

    Loads only grow, so an entry that is out of date comes too early, and is put back where it belongs.
    """
    full: list[tuple[float, float, int]] = []
    found = None
    while queue and found is None:
        entry = heapq.heappop(queue)
        rank = entry[2]
        if entry != loads.key(rank):
            heapq.heappush(queue, loads.key(rank))
        elif loads.bytes[rank] and loads.bytes[rank] + unit.bytes > loads.room:
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
