"""How many peers step each work: a search for the shortest step, exchange included."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field

from megaopt_layerwise.planner.blocks import Kind, Packed, block_sizes, kinds_of, pack_blocks
from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.plan import imbalance
from megaopt_layerwise.planner.works import Carried, Work

__all__ = ["plan_peers"]

_EFFORT = 400_000
"""Works that may be packed in one search, over all trials: a bound on its time."""

_DEARNESS = 8
"""Each percent of memory above the room for it counts as so many percent of time."""

_EVEN = 1.05
"""Largest operations of a rank over their mean that cost nothing: what more there is idles while others exchange."""

type _Sizes = tuple[Mapping[int, int], ...]
"""For each kind of works, size of a block to how many of them get such a block."""


def plan_peers(
    works: Sequence[Work], ranks: int, model: CostModel, room: float, carried: Carried | None = None
) -> Packed:
    """Return blocks of peers for works, some of one rank alone, with the shortest step that was found.

    First every kind of works gets the smallest block in which its part takes at most some time, for every time that
    matters, and where every rank gets as many whole works of a kind, a block for each that is left over. Then shares of
    one kind change to another size, for as long as that makes the step shorter. Of two searches the better plan is
    taken: for a short step and then for an even one, and for both at once.

    Args:
        works: what to share out; all ranks can own each of them.
        ranks: how many there are.
        model: weighs operations against what peers exchange.
        room: bytes of state for each rank.
        carried: what the ranks step besides.
    """
    found = []
    for begins_even in (False, True):
        search = _Search(kinds_of(works), ranks, model, room, carried, prefers_even=begins_even)
        search.begin()
        search.improve()
        if not begins_even:
            search.prefers_even = True
            search.improve()
        found.append(search)
    return min(found, key=lambda search: search.rank(search.best)).best


@define(eq=False)
class _Search:
    kinds: Sequence[Kind]
    ranks: int
    model: CostModel
    room: float
    carried: Carried | None = None
    prefers_even: bool = True
    best: Packed = field(init=False)
    _sizes: _Sizes = field(init=False)
    _options: list[list[int]] = field(init=False)
    _trials: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        possible = block_sizes(self.ranks)
        self._options = [_options_of(kind.work, possible, self.model) for kind in self.kinds]
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

    def rank(self, packed: Packed) -> tuple[float, float]:
        """Return what plans are compared by: time, lengthened where a rank has much more to hold or to do than others.

        Args:
            packed: a plan.
        """
        overfull = max(max(packed.state_bytes) / self.room, 1.0)
        uneven = max(imbalance(packed.costs) / _EVEN, 1.0) if self.prefers_even else 1.0
        return packed.step_seconds * (overfull * uneven) ** _DEARNESS, sum(packed.seconds)

    def _try(self, sizes: _Sizes) -> bool:
        """Keep a plan if it is better than the best one."""
        self._trials -= 1
        before = self.rank(self.best)
        packed = self._pack(sizes, limit=before[0])
        if packed is None:
            return False
        after = self.rank(packed)
        if after[0] < before[0] * (1 - 1e-9) or (after[0] <= before[0] and after[1] < before[1] * (1 - 1e-9)):
            self.best, self._sizes = packed, sizes
            return True
        return False

    def begin(self) -> None:
        """Try the smallest blocks in which no part takes longer than some time, and blocks for what is left over."""
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
        for shared in self._with_rest_shared():
            self._try(shared)

    def _with_rest_shared(self) -> Iterator[_Sizes]:
        """Yield plans in which all ranks have as many whole works of one kind, and blocks share those that are left."""
        for at, (kind, options) in enumerate(zip(self.kinds, self._options, strict=True)):
            rest = len(kind.names) % self.ranks
            if rest == len(kind.names) or not rest:
                continue
            for size in options[1:]:
                yield (*self._sizes[:at], {1: len(kind.names) - rest, size: rest}, *self._sizes[at + 1 :])

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


def _options_of(work: Work, possible: Sequence[int], model: CostModel) -> list[int]:
    """Return the sizes of blocks that a work may get: those that are faster than one rank, or the one asked for."""
    allowed = [size for size in possible if size == 1 or size <= work.most_peers]
    if work.asked_peers is not None:
        return [max(size for size in allowed if size <= work.asked_peers)]
    alone = model.part_seconds(work, 1)
    return [size for size in allowed if size == 1 or model.part_seconds(work, size) < alone]
