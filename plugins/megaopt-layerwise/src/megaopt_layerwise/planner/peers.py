"""How many peers step each work: a search for the shortest step, exchange included."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field

from megaopt_layerwise.planner.blocks import Kind, Packed, block_sizes, kinds_of, pack_blocks
from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.works import Carried, Work

__all__ = ["plan_peers"]

_EFFORT = 400_000
"""Works that may be packed in one search, over all trials: a bound on its time."""

_DEARNESS = 8
"""Each percent of memory above the room for it counts as so many percent of time."""

type _Sizes = tuple[Mapping[int, int], ...]
"""For each kind of works, size of a block to how many of them get such a block."""


def plan_peers(
    works: Sequence[Work], ranks: int, model: CostModel, room: float, carried: Carried | None = None
) -> Packed:
    """Return blocks of peers for works, some of one rank alone, with the shortest step that was found.

    First every kind of works gets the smallest block in which its part takes at most some time, for every time that
    matters. Then shares of one kind change to another size, for as long as that makes the step shorter.

    Args:
        works: what to share out; all ranks can own each of them.
        ranks: how many there are.
        model: weighs operations against what peers exchange.
        room: bytes of state for each rank.
        carried: what the ranks step besides.
    """
    search = _Search(kinds_of(works), ranks, model, room, carried)
    search.begin()
    search.improve()
    return search.best


@define(eq=False)
class _Search:
    kinds: Sequence[Kind]
    ranks: int
    model: CostModel
    room: float
    carried: Carried | None = None
    best: Packed = field(init=False)
    _sizes: _Sizes = field(init=False)
    _options: list[list[int]] = field(init=False)
    _trials: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        possible = block_sizes(self.ranks)
        self._options = [_options_of(kind.work, possible) for kind in self.kinds]
        self._trials = max(_EFFORT // max(sum(len(kind.names) for kind in self.kinds), 1), 40)
        self._sizes = tuple(
            {options[0]: len(kind.names)} for kind, options in zip(self.kinds, self._options, strict=True)
        )
        packed = self._pack(self._sizes)
        assert packed is not None  # noqa: S101 - without a limit there is always a plan
        self.best = packed

    def _pack(self, sizes: _Sizes, limit: float = math.inf) -> Packed | None:
        return pack_blocks(
            self.kinds, sizes, self.ranks, self.model, room=self.room, limit=limit, carried=self.carried
        )

    def _rank(self, packed: Packed) -> tuple[float, float]:
        """Return what plans are compared by: time, lengthened where a rank has more state than it has room for."""
        overfull = max(max(packed.state_bytes) / self.room, 1.0)
        return packed.step_seconds * overfull**_DEARNESS, sum(packed.seconds)

    def _try(self, sizes: _Sizes) -> bool:
        """Keep a plan if it is better than the best one."""
        self._trials -= 1
        before = self._rank(self.best)
        packed = self._pack(sizes, limit=before[0])
        if packed is None:
            return False
        after = self._rank(packed)
        if after[0] < before[0] * (1 - 1e-9) or (after[0] <= before[0] and after[1] < before[1] * (1 - 1e-9)):
            self.best, self._sizes = packed, sizes
            return True
        return False

    def begin(self) -> None:
        """Try the smallest blocks in which no part takes longer than some time."""
        times = {
            self.model.part_seconds(kind.work, size)
            for kind, options in zip(self.kinds, self._options, strict=True)
            for size in options
        }
        seen = {self._key(self._sizes)}
        for limit in sorted(times):
            sizes = tuple(
                {self._smallest(kind, options, limit): len(kind.names)}
                for kind, options in zip(self.kinds, self._options, strict=True)
            )
            if self._key(sizes) not in seen and self._trials > 0:
                seen.add(self._key(sizes))
                self._try(sizes)

    def _smallest(self, kind: Kind, options: Sequence[int], limit: float) -> int:
        def seconds(size: int) -> float:
            return self.model.part_seconds(kind.work, size)

        fitting = (size for size in options if seconds(size) <= limit)
        return next(fitting, min(options, key=seconds))

    @staticmethod
    def _key(sizes: _Sizes) -> tuple[tuple[tuple[int, int], ...], ...]:
        return tuple(tuple(sorted(counts.items())) for counts in sizes)

    def improve(self) -> None:
        """Change the size of some works of one kind, the most first, while that helps."""
        changed = True
        while changed and self._trials > 0:
            changed = False
            for sizes in self._neighbours():
                if self._trials <= 0:
                    return
                if self._try(sizes):
                    changed = True
                    break

    def _neighbours(self) -> Iterator[_Sizes]:
        current = self._sizes
        for fraction in (1, 2, 4, 8, 16, 32, 64):
            for at, counts in enumerate(current):
                for source, count in counts.items():
                    moved = max(sum(counts.values()) // fraction, 1)
                    for target in self._options[at]:
                        if target != source and moved <= count:
                            changed = {**counts, source: count - moved, target: counts.get(target, 0) + moved}
                            kept = {size: some for size, some in changed.items() if some}
                            yield (*current[:at], kept, *current[at + 1 :])


def _options_of(work: Work, possible: Sequence[int]) -> list[int]:
    """Return the sizes of blocks that a work may get: all up to the largest, or the one that was asked for."""
    allowed = [size for size in possible if size == 1 or size <= work.most_peers]
    if work.asked_peers is None:
        return allowed
    return [max(size for size in allowed if size <= work.asked_peers)]
