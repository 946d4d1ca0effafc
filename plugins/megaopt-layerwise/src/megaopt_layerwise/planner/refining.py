"""Exchanges between the fullest rank and others, for as long as they make the fullest one less full."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from attrs import define, field

from megaopt_layerwise.planner.packing import Loads
from megaopt_layerwise.planner.units import Unit

__all__ = ["refine"]

_FEW = 32
"""Ranks with the least load that are looked at before all others are."""

type _Kind = tuple[float, float, tuple[int, ...] | None]
"""Units of one load, bytes and able ranks can stand for each other."""


def refine(units: Sequence[Unit], owners: list[int], loads: Loads) -> None:
    """Move units, or exchange two, until the fullest rank cannot become less full; changes owners and loads.

    Args:
        units: what was shared out.
        owners: of every unit.
        loads: what the ranks have.
    """
    exchanges = _Exchanges(units, owners, loads)
    for _ in range(4 * loads.ranks):
        if not exchanges.improve():
            return


@define(eq=False)
class _Exchanges:
    units: Sequence[Unit]
    owners: list[int]
    loads: Loads
    _held: list[dict[_Kind, list[int]]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._held = [{} for _ in range(self.loads.ranks)]
        for at, rank in enumerate(self.owners):
            self._held[rank].setdefault(self._kind(at), []).append(at)

    def _kind(self, at: int) -> _Kind:
        unit = self.units[at]
        return unit.load, unit.bytes, unit.ranks

    def improve(self) -> bool:
        """Make the fullest rank less full, with the best exchange that there is."""
        fullest = max(range(self.loads.ranks), key=lambda rank: (self.loads.load[rank], -rank))
        few = heapq.nsmallest(_FEW, range(self.loads.ranks), key=self.loads.key)
        best = min(self._with_all(fullest, few), default=None)
        if best is None and self.loads.ranks > _FEW:
            best = min(self._with_all(fullest, range(self.loads.ranks)), default=None)
        if best is None:
            return False
        _, other, given, taken = best
        self._move(given, fullest, other)
        if taken >= 0:
            self._move(taken, other, fullest)
        return True

    def _with_all(self, fullest: int, others: Sequence[int]) -> Iterator[tuple[float, int, int, int]]:
        for other in others:
            if self.loads.load[other] < self.loads.load[fullest]:
                yield from self._with_one(fullest, other)

    def _with_one(self, fullest: int, other: int) -> Iterator[tuple[float, int, int, int]]:
        """Yield `(load of the fuller one afterwards, other rank, unit given, unit taken)`; -1: nothing is taken."""
        load, room = self.loads.load, max(self.loads.room, self.loads.bytes[fullest], self.loads.bytes[other])
        gap = load[fullest] - load[other]
        for (given_load, given_bytes, able), given in self._held[fullest].items():
            if not given or (able is not None and other not in able):
                continue
            for (taken_load, taken_bytes, able_too), taken in (
                *self._held[other].items(),
                ((0.0, 0.0, None), [-1]),
            ):
                moved, bytes_moved = given_load - taken_load, given_bytes - taken_bytes
                # Rounding must not make an exchange look like an improvement, or it would never end.
                if not taken or not 1e-9 * load[fullest] < moved < gap * (1 - 1e-9):
                    continue
                fits = (
                    max(self.loads.bytes[fullest] - bytes_moved, self.loads.bytes[other] + bytes_moved)
                    <= room
                )
                if fits and (able_too is None or fullest in able_too):
                    yield max(load[fullest] - moved, load[other] + moved), other, given[-1], taken[-1]

    def _move(self, at: int, source: int, target: int) -> None:
        unit = self.units[at]
        self._held[source][self._kind(at)].remove(at)
        self._held[target].setdefault(self._kind(at), []).append(at)
        self.owners[at] = target
        for rank, sign in ((source, -1.0), (target, 1.0)):
            self.loads.load[rank] += sign * unit.load
            self.loads.bytes[rank] += sign * unit.bytes
