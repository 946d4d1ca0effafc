"""Which flat pieces of which buckets each rank steps, as pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from attrs import define, evolve, field

from megaopt_core.params import ParamSpec, RankCoordinates
from megaopt_core.sharding import (
    BufferKey,
    LayoutOptions,
    ParamLayout,
    PerBufferParamLayout,
    PieceSpec,
    World,
)
from megaopt_distributed.buffers.buffer_layout import lay_out_buffers

__all__ = ["FlatLayout", "LayoutInBuffers", "as_whole"]

type _Placed = tuple[list[int], list[tuple[int, int, ParamSpec]]]
type _Slice = tuple[int, int, int, ParamSpec]
"""`(start, stop, first, parameter)`: a range of a buffer that lies in a parameter, which begins at `first`."""


def as_whole(spec: ParamSpec, rank: RankCoordinates) -> ParamSpec:
    """Return what a rank has of a parameter, as a parameter that nothing divides.

    Args:
        spec: the parameter.
        rank: the rank's coordinates.
    """
    return evolve(spec, shape=spec.box(rank)[1], placements=()) if spec.dividing else spec


class LayoutInBuffers(ParamLayout, Protocol):
    """Who steps what, where every piece is a range of a buffer.

    Args:
        specs: name to parameter.
        world: number of ranks along each axis.
        options: the buffers that the model is wrapped in, if any.
    """

    specs: Mapping[str, ParamSpec]
    world: World
    options: LayoutOptions

    @property
    def fused(self) -> bool:
        """True where the buffers are those that the model is wrapped in; False: they are made for the layout."""
        return self.options.buffers is not None

    def buffers(self, rank: RankCoordinates) -> Mapping[BufferKey, PerBufferParamLayout]:
        """Return where a rank's parameters lie.

        Args:
            rank: its coordinates.
        """

    def shards(self, key: BufferKey) -> int:
        """Return how many ranks share a buffer out.

        Args:
            key: the buffer.
        """
        return self.world.size("expert_dp" if key.is_expert else "dp")

    def groups_of(self, key: BufferKey, rank: RankCoordinates) -> list[set[int]]:
        """Return for every bucket of a buffer the groups that have parameters in it, on any rank that shares it.

        Args:
            key: the buffer.
            rank: the coordinates of one of these ranks.
        """
        buffer = self.buffers(rank)[key]
        groups: list[set[int]] = [set() for _ in buffer.bucket_ends]
        for name, bucket in buffer.bucket_of.items():
            if name in self.specs:
                groups[bucket].add(self.specs[name].group)
        return groups


@define(eq=False)
class FlatLayout(LayoutInBuffers):
    """Every bucket is cut into shares, one a rank; a piece is a run of one group inside a share.

    A run joins parameters that lie next to each other without padding between them, where `fused` allows it: an inner
    optimizer then makes one call in place of many. A parameter whose size is no multiple of the alignment ends its run,
    because element-wise kernels give the last few elements of a tensor other bits than those in the middle. A parameter
    of no elements is a piece of the first rank, so that checkpoints have its state as without sharding.

    Args:
        specs: name to parameter.
        world: number of ranks along each axis.
        options: the buffers that the model is wrapped in, or how memory of our own is divided.
    """

    specs: Mapping[str, ParamSpec]
    world: World
    options: LayoutOptions
    _buffers: dict[tuple[int, ...], Mapping[BufferKey, PerBufferParamLayout]] = field(
        factory=dict, init=False
    )
    _placed: dict[tuple[BufferKey, tuple[int, ...]], _Placed] = field(factory=dict, init=False)
    _axes: tuple[str, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        dividing = {placement.axis for spec in self.specs.values() for placement in spec.dividing}
        self._axes = tuple(sorted(dividing))

    def _place(self, rank: RankCoordinates) -> tuple[int, ...]:
        """Return where a rank stands on the axes that divide parameters: others there have parts of other sizes."""
        return tuple(rank.get(axis, 0) for axis in self._axes)

    def buffers(self, rank: RankCoordinates) -> Mapping[BufferKey, PerBufferParamLayout]:
        """Return where a rank's parameters lie.

        Args:
            rank: its coordinates.
        """
        if self.options.buffers is not None:
            return self.options.buffers
        place = self._place(rank)
        if place not in self._buffers:
            local = [as_whole(spec, rank) for spec in self.specs.values() if spec.held_by(rank)]
            self._buffers[place] = lay_out_buffers(local, self.world, self.options)
        return self._buffers[place]

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return what a rank steps, bucket by bucket.

        Args:
            rank: its coordinates.
        """
        found: list[PieceSpec] = []
        for key, buffer in self.buffers(rank).items():
            index = rank.get("expert_dp" if key.is_expert else "dp", 0)
            placed = self._places(key, rank)
            for bucket in range(len(buffer.bucket_ends)):
                low, high = buffer.share(bucket, index, self.shards(key))
                found.extend(_piece(key, run, rank) for run in self._runs(_between(placed, low, high)))
                if index == 0:
                    empty = (spec for _, _, spec in placed[1] if 0 in spec.shape)
                    found.extend(
                        _piece(key, [(low, low, low, spec)], rank)
                        for spec in empty
                        if buffer.bucket_of[spec.name] == bucket
                    )
        return found

    def _runs(self, slices: Iterable[_Slice]) -> Iterator[list[_Slice]]:
        run: list[_Slice] = []
        for each in slices:
            if run and not (self.fused and run[-1][1] == each[0] and run[-1][3].group == each[3].group):
                yield run
                run = []
            run.append(each)
        if run:
            yield run

    def _places(self, key: BufferKey, rank: RankCoordinates) -> _Placed:
        """Return where the parameters of a buffer begin, in order, and for each `(first, last, parameter)`."""
        where = key, self._place(rank)
        if where not in self._placed:
            ranges = self.buffers(rank)[key].param_ranges
            places = sorted(
                ((*ranges[name], self.specs[name]) for name in ranges if name in self.specs),
                key=lambda place: place[:2],
            )
            self._placed[where] = [first for first, _, _ in places], places
        return self._placed[where]


def _between(placed: _Placed, low: int, high: int) -> Iterator[_Slice]:
    """Yield what lies in `[low, high)` of a buffer."""
    starts, places = placed
    for index in range(max(bisect_right(starts, low) - 1, 0), len(starts)):
        first, last, spec = places[index]
        if first >= high:
            break
        start, stop = max(first, low), min(last, high)
        if start < stop:
            yield start, stop, first, spec


def _piece(key: BufferKey, run: Sequence[_Slice], rank: RankCoordinates) -> PieceSpec:
    begin, end = run[0][0], run[-1][1]
    members = tuple(
        (start - begin, spec.shard(rank, start - first, stop - first)) for start, stop, first, spec in run
    )
    return PieceSpec(run[0][3].group, (end - begin,), members, (key, begin, end))
