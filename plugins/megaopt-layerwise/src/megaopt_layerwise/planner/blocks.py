"""Packing of works that blocks of consecutive ranks step together: the largest blocks first, then inside them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.works import Carried, Work

__all__ = ["Kind", "Packed", "block_sizes", "kinds_of", "pack_blocks"]


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
    """

    first_ranks: Mapping[str, tuple[int, int]]
    seconds: Sequence[float]
    state_bytes: Sequence[float]

    @property
    def step_seconds(self) -> float:
        """Time of the slowest rank."""
        return max(self.seconds)


def block_sizes(ranks: int, most: int = 64) -> list[int]:
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
            float(work.most_peers),
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
    seconds, state = [0.0], [0.0]  # of what was packed: equal inside blocks of the width
    width = ranks
    first_ranks: dict[str, tuple[int, int]] = {}
    for size in sorted(parts, reverse=True):
        seconds = [each for each in seconds for _ in range(width // size)]
        state = [each for each in state for _ in range(width // size)]
        width = size
        before, state_before = _fullest(first_seconds, size), _fullest(first_state, size)
        queue = [
            (seconds[block] + before[block], state[block] + state_before[block], block)
            for block in range(ranks // size)
        ]
        heapq.heapify(queue)
        for part_seconds, part_state, name in parts[size]:
            load, held, block = _take(queue, part_state, room)
            seconds[block] += part_seconds
            state[block] += part_state
            if load + part_seconds > limit:
                return None
            heapq.heappush(queue, (load + part_seconds, held + part_state, block))
            first_ranks[name] = block * size, size
    return Packed(
        first_ranks,
        [each + seconds[rank // width] for rank, each in enumerate(first_seconds)],
        [each + state[rank // width] for rank, each in enumerate(first_state)],
    )


def _fullest(values: Sequence[float], size: int) -> list[float]:
    """Return the largest value in each block of a size."""
    return [max(values[at : at + size]) for at in range(0, len(values), size)]


def _parts(
    kinds: Sequence[Kind], sizes: Sequence[Mapping[int, int]], model: CostModel
) -> dict[int, list[tuple[float, float, str]]]:
    """Return `(seconds, bytes of state, name)` of the parts of every size of block, the longest first."""
    parts: dict[int, list[tuple[float, float, str]]] = {}
    for kind, counts in zip(kinds, sizes, strict=True):
        begin = 0
        for size, count in sorted(counts.items()):
            part = model.part_seconds(kind.work, size), kind.work.state_bytes / size
            parts.setdefault(size, []).extend((*part, name) for name in kind.names[begin : begin + count])
            begin += count
    return {
        size: sorted(some, key=lambda part: (-part[0], -part[1], part[2])) for size, some in parts.items()
    }


def _take(queue: list[tuple[float, float, int]], state: float, room: float) -> tuple[float, float, int]:
    """Take the least loaded block with room; where none has room, the emptiest one."""
    full = []
    while queue and queue[0][1] and queue[0][1] + state > room:
        full.append(heapq.heappop(queue))
    if queue:
        found = heapq.heappop(queue)
    else:
        found = min(full, key=lambda entry: (entry[1], entry[0], entry[2]))
        full.remove(found)
    for entry in full:
        heapq.heappush(queue, entry)
    return found
