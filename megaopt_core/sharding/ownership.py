"""Whether all ranks together own every element of every parameter once, as the layout alone shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from attrs import define, field

from megaopt_core.errors import OwnershipError
from megaopt_core.params.specs import Box, ParamSpec, Shard
from megaopt_core.sharding.base import ParamLayout
from megaopt_core.sharding.layout import World

__all__ = ["require_partition"]

_MOST_SLICES = 2**18
"""Slices of parameters after which no further rank is asked for its own: a few seconds of work."""

type _Slices = dict[Box, list[tuple[int, int]]]
"""Slices of one parameter, by the box that they are ranges of."""


def require_partition(strategy: str, layout: ParamLayout, specs: Sequence[ParamSpec], world: World) -> None:
    """Raise unless the pieces of all data-parallel ranks are a partition of every parameter.

    Pure: every rank looks at the pieces of all ranks, and nobody communicates. Expert parameters are looked at over the
    expert data-parallel ranks. Two exceptions keep it fast:

    - where the first rank and the last each own all parameters whole, the layout replicates, and the ranks between are
      not asked;
    - where every rank has a slice of nearly every parameter, ranks are asked in their order until 2**18 slices have
      been seen. Elements that two of these own are found; elements that nobody owns are not.

    Args:
        strategy: its name, for errors.
        layout: what it returned.
        specs: the parameters that it was given.
        world: sizes of the groups.

    Raises:
        OwnershipError: elements of a parameter are owned by no rank or more than once, a piece mixes groups, or it
            holds a parameter that the strategy was not given.
    """
    for is_expert in (False, True):
        mine = {spec.name: spec for spec in specs if spec.is_expert is is_expert}
        others = {spec.name for spec in specs if spec.is_expert is not is_expert}
        if mine:
            size = world.expert_data_parallel_size if is_expert else world.data_parallel_size
            _Ownership(strategy, layout, mine, others, is_expert, size).require_partition()


@define(eq=False)
class _Ownership:
    strategy: str
    layout: ParamLayout
    specs: Mapping[str, ParamSpec]
    others: set[str]
    is_expert: bool
    size: int
    seen: int = field(default=0, init=False)

    def require_partition(self) -> None:
        if self.size > 1 and self._all_on(0) and self._all_on(self.size - 1):
            return
        self.seen = 0
        owned: dict[str, _Slices] = {name: {} for name in self.specs}
        asked = 0
        while asked < self.size and self.seen < _MOST_SLICES:
            self._add(asked, owned)
            asked += 1
        wrong = self._wrong(owned, is_complete=asked == self.size)
        if wrong:
            name, reason = next(iter(wrong.items()))
            raise OwnershipError(
                f"sharding strategy {self.strategy!r} must own every element once over {self.size} "
                f"{'expert ' * self.is_expert}data-parallel ranks, but {reason} of {name!r} ({len(wrong)} parameters "
                "are wrong)",
                names=wrong,
            )

    def _all_on(self, rank: int) -> bool:
        owned: dict[str, _Slices] = {name: {} for name in self.specs}
        self._add(rank, owned)
        held = sum(
            stop - start for slices in owned.values() for some in slices.values() for start, stop in some
        )
        if held != sum(spec.numel for spec in self.specs.values()):
            return False
        return not self._wrong(owned, is_complete=True)

    def _add(self, rank: int, owned: dict[str, _Slices]) -> None:
        pieces = self.layout.pieces(0, rank) if self.is_expert else self.layout.pieces(rank, 0)
        for piece in pieces:
            for _, shard in piece.members:
                spec = self.specs.get(shard.name)
                if spec is not None:
                    if spec.group != piece.group:
                        self._refuse(shard, f"belongs to group {spec.group}, not to {piece.group}")
                    owned[shard.name].setdefault(shard.box, []).append((shard.start, shard.stop))
                elif shard.name not in self.others:
                    self._refuse(shard, "was not given to it")
            self.seen += len(piece.members)

    def _refuse(self, shard: Shard, reason: str) -> None:
        raise OwnershipError(
            f"sharding strategy {self.strategy!r} has a piece with {shard.name!r}, which {reason}",
            names=[shard.name],
        )

    def _wrong(self, owned: Mapping[str, _Slices], *, is_complete: bool) -> dict[str, str]:
        """Return what is wrong with each parameter that is not owned once."""
        found = {}
        for name, slices in owned.items():
            reason = _wrong_in_boxes(slices, is_complete=is_complete) or _wrong_boxes(
                self.specs[name], slices, is_complete=is_complete
            )
            if reason is not None:
                found[name] = reason
        return found


def _wrong_in_boxes(slices: _Slices, *, is_complete: bool) -> str | None:
    """Return what is wrong with the ranges inside each box."""
    for box, ranges in slices.items():
        position, numel = 0, math.prod(box[1])
        for start, stop in sorted(ranges):
            if start < min(position, stop):
                return f"more than one rank owns elements [{start}, {min(stop, position)})"
            if start > position and is_complete:
                return f"no rank owns elements [{position}, {start})"
            position = max(position, stop)
        if position < numel and is_complete:
            return f"no rank owns elements [{position}, {numel})"
    return None


def _wrong_boxes(spec: ParamSpec, boxes: Iterable[Box], *, is_complete: bool) -> str | None:
    """Return what is wrong with the boxes themselves, which have to tile the parameter's own."""
    found = list(boxes)
    if found == [spec.box]:
        return None
    for box in found:
        if not _inside(box, spec.box):
            return f"a rank owns elements of the box {box}, which leaves the box {spec.box}"
    overlap = _overlap(found)
    if overlap is not None:
        return f"more than one rank owns what the boxes {overlap[0]} and {overlap[1]} share"
    missing = spec.numel - sum(math.prod(sizes) for _, sizes in found)
    if missing and is_complete:
        return f"no rank owns {missing} of the {spec.numel} elements"
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, looking along the dimension that is cut most."""
    if len(boxes) < 2:
        return None
    along = max(range(len(boxes[0][0])), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[0][along] + other[1][along] > box[0][along]]
        for other in active:
            if _meet(other, box):
                return other, box
        active.append(box)
    return None


def _meet(one: Box, other: Box) -> bool:
    return all(
        max(first, second) < min(first + size, second + extent)
        for first, size, second, extent in zip(*one, *other, strict=True)
    )


def _inside(box: Box, whole: Box) -> bool:
    return all(
        first <= second and second + extent <= first + size
        for first, size, second, extent in zip(*whole, *box, strict=True)
    )
