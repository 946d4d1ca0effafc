"""Packing of works that blocks of consecutive ranks step together: the largest blocks first, then inside them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from attrs import define, field, frozen

from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.works import Carried, Work

__all__ = ["Kind", "Packed", "block_sizes", "kinds_of", "pack_blocks"]

_LARGEST = 64
"""Ranks of the largest block."""


@frozen
class Kind:
    """Works that differ in their names alone.

    Args:
        names: of the works, sorted.
        work: one of them.
    """

    names: tuple[str, ...]
    work: Work


@frozen
class Packed:
    """Where blocks went.

    Args:
        first_ranks: name to the first rank of the block, and its size.
        seconds: of every rank.
        state_bytes: of every rank.
        costs: operations of every rank.
    """

    first_ranks: Mapping[str, tuple[int, int]]
    seconds: Sequence[float]
    state_bytes: Sequence[float]
    costs: Sequence[float]

    @property
    def step_seconds(self) -> float:
        """Time of the slowest rank."""
        return max(self.seconds)


def block_sizes(ranks: int, most: int = _LARGEST) -> list[int]:
    """Return sizes of blocks that divide the ranks, each a multiple of the one before: from 1 on.

    Args:
        ranks: how many there are.
        most: the largest size.

    Example:
        >>> block_sizes(48, most=16), block_sizes(7)
        ([1, 2, 4, 8, 16], [1, 7])
    """
    sizes = [1]
    while True:
        rest = ranks // sizes[-1]
        factor = next((factor for factor in range(2, rest + 1) if rest % factor == 0), None)
        if factor is None or sizes[-1] * factor > most:
            return sizes
        sizes.append(sizes[-1] * factor)


def kinds_of(works: Sequence[Work]) -> list[Kind]:
    """Return works by what they cost.

    Args:
        works: in any order.
    """
    by_numbers: dict[tuple[float, ...], list[Work]] = {}
    for work in works:
        numbers = (
            work.cost,
            float(work.numel),
            work.state_bytes,
            float(min(work.most_peers, _LARGEST)),
            work.repeated,
            work.exchanged,
            float(work.asked_peers or 0),
        )
        by_numbers.setdefault(numbers, []).append(work)
    return [
        Kind(tuple(sorted(work.name for work in some)), some[0]) for _, some in sorted(by_numbers.items())
    ]


def pack_blocks(
    kinds: Sequence[Kind],
    sizes: Sequence[Mapping[int, int]],
    ranks: int,
    model: CostModel,
    *,
    room: float = math.inf,
    limit: float = math.inf,
    carried: Carried | None = None,
) -> Packed | None:
    """Share works out over blocks: those of large blocks first, each size by the longest time first.

    The ranks of a block wait for each other: it is as full as the fullest of them.

    Args:
        kinds: the works.
        sizes: for each kind, size of a block to how many of its works get such a block.
        ranks: how many there are.
        model: tells the time of a part.
        room: bytes of state that no part may take a rank beyond while another block has room.
        limit: seconds that no rank may take.
        carried: what the ranks step besides.

    Returns:
        Where the works went; None where a rank would take longer than the limit.
    """
    parts = _parts(kinds, sizes, model)
    first_seconds = [model.compute_seconds(cost) for cost in carried.costs] if carried else [0.0] * ranks
    first_state = list(carried.state_bytes) if carried else [0.0] * ranks
    seconds, state, costs = [0.0], [0.0], [0.0]  # of what was packed: equal inside blocks of the width
    width = ranks
    first_ranks: dict[str, tuple[int, int]] = {}
    for size in sorted(parts, reverse=True):
        seconds, state, costs = (
            [each for each in values for _ in range(width // size)] for values in (seconds, state, costs)
        )
        width = size
        before, state_before = _fullest(first_seconds, size), _fullest(first_state, size)
        blocks = _Blocks(
            [each + other for each, other in zip(seconds, before, strict=True)],
            [each + other for each, other in zip(state, state_before, strict=True)],
            room,
        )
        for part_seconds, part_state, name, part_cost in parts[size]:
            block = blocks.take(part_seconds, part_state)
            seconds[block] += part_seconds
            state[block] += part_state
            costs[block] += part_cost
            if blocks.seconds[block] > limit:
                return None
            first_ranks[name] = block * size, size
    first_costs = carried.costs if carried else [0.0] * ranks
    return Packed(
        first_ranks,
        [each + seconds[rank // width] for rank, each in enumerate(first_seconds)],
        [each + state[rank // width] for rank, each in enumerate(first_state)],
        [each + costs[rank // width] for rank, each in enumerate(first_costs)],
    )


def _fullest(values: Sequence[float], size: int) -> list[float]:
    """Return the largest value in each block of a size."""
    return [max(values[at : at + size]) for at in range(0, len(values), size)]


def _parts(
    kinds: Sequence[Kind], sizes: Sequence[Mapping[int, int]], model: CostModel
) -> dict[int, list[tuple[float, float, str, float]]]:
    """Return `(seconds, bytes of state, name, cost)` of the parts of every size of block, the longest first."""
    parts: dict[int, list[tuple[float, float, str, float]]] = {}
    for kind, counts in zip(kinds, sizes, strict=True):
        begin = 0
        for size, count in sorted(counts.items()):
            part = model.part_seconds(kind.work, size), kind.work.state_bytes / size
            cost = model.part_cost(kind.work, size)
            names = kind.names[begin : begin + count]
            parts.setdefault(size, []).extend((*part, name, cost) for name in names)
            begin += count
    return {
        size: sorted(some, key=lambda part: (-part[0], -part[1], part[2])) for size, some in parts.items()
    }


@define(eq=False)
class _Blocks:
    """Blocks of one size, and what the fullest rank of each has.

    Both queues keep entries that are out of date, which are left out when they come first.
    """

    seconds: list[float]
    state: list[float]
    room: float
    _by_seconds: list[tuple[float, float, int]] = field(init=False)
    _by_state: list[tuple[float, float, int]] = field(init=False)
    _full: list[tuple[float, float, int]] = field(factory=list)
    _full_for: float = math.inf

    def __attrs_post_init__(self) -> None:
        blocks = range(len(self.seconds))
        self._by_seconds = [(self.seconds[block], self.state[block], block) for block in blocks]
        self._by_state = [(self.state[block], self.seconds[block], block) for block in blocks]
        heapq.heapify(self._by_seconds)
        heapq.heapify(self._by_state)

    def take(self, seconds: float, state: float) -> int:
        """Add a part to the least loaded block with room, or where none has room to the emptiest one; return it."""
        if state < self._full_for:
            for entry in self._full:
                heapq.heappush(self._by_seconds, entry)
            self._full.clear()
        self._full_for = state
        while (self._by_state[0][0], self._by_state[0][1]) != self._now(self._by_state[0][2]):
            heapq.heappop(self._by_state)
        found = self._by_state[0][2]
        if self._has_room(found, state):
            found = self._least_loaded(state)
        self.seconds[found] += seconds
        self.state[found] += state
        heapq.heappush(self._by_seconds, (self.seconds[found], self.state[found], found))
        heapq.heappush(self._by_state, (self.state[found], self.seconds[found], found))
        return found

    def _least_loaded(self, state: float) -> int:
        """Take the least loaded block with room out of its queue; there is one."""
        while True:
            entry = heapq.heappop(self._by_seconds)
            block = entry[2]
            if (entry[1], entry[0]) != self._now(block):
                continue
            if self._has_room(block, state):
                return block
            self._full.append(entry)  # until a part with less state comes

    def _now(self, block: int) -> tuple[float, float]:
        return self.state[block], self.seconds[block]

    def _has_room(self, block: int, state: float) -> bool:
        return not self.state[block] or self.state[block] + state <= self.room
