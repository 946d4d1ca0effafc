"""Which flat pieces of which buckets each rank steps, as pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence

from attrs import define, field

from megaopt_core.params.specs import ParamSpec
from megaopt_core.sharding.layout import BufferKey, GradReduction, PerBufferParamLayout, PieceSpec, World

__all__ = ["FlatLayout"]

type _Placed = tuple[list[int], list[tuple[int, int, ParamSpec]]]
type _Slice = tuple[int, int, int, ParamSpec]
"""`(start, stop, first, parameter)`: a range of a buffer that lies in a parameter, which begins at `first`."""


@define(eq=False)
class FlatLayout:
    """Every bucket is cut into equal shards, one a rank; a piece is a run of one group inside a shard.

    A run joins parameters that lie next to each other without padding between them, where `fused` allows it: an inner
    optimizer then makes one call in place of many. A parameter whose size is no multiple of the alignment ends its run,
    because element-wise kernels give the last few elements of a tensor other bits than those in the middle.

    Args:
        specs: name to parameter.
        buffers: where the parameters lie.
        world: how many ranks share each buffer out.
        fused: join parameters; False: a piece has one member.
    """

    specs: Mapping[str, ParamSpec]
    buffers: Mapping[BufferKey, PerBufferParamLayout]
    world: World
    fused: bool
    _sorted: dict[BufferKey, _Placed] = field(factory=dict, init=False)

    @property
    def reduction(self) -> Mapping[BufferKey, GradReduction]:
        """Buffers are reduce-scattered where gradients lie in them."""
        return {key: GradReduction(scatter=self.fused) for key in self.buffers}

    def shards(self, key: BufferKey) -> int:
        """Return how many ranks share a buffer out.

        Args:
            key: the buffer.
        """
        return self.world.expert_data_parallel_size if key.is_expert else self.world.data_parallel_size

    def groups_of(self, key: BufferKey) -> list[set[int]]:
        """Return for every bucket of a buffer the groups that have parameters in it, on any rank.

        Args:
            key: the buffer.
        """
        buffer = self.buffers[key]
        groups: list[set[int]] = [set() for _ in buffer.bucket_ends]
        for name, bucket in buffer.bucket_of.items():
            if name in self.specs:
                groups[bucket].add(self.specs[name].group)
        return groups

    def pieces(self, dp_rank: int, expert_dp_rank: int) -> Sequence[PieceSpec]:
        """Return what a rank steps, bucket by bucket.

        Args:
            dp_rank: rank among those that share dense parameters out.
            expert_dp_rank: rank among those that share expert parameters out.
        """
        found: list[PieceSpec] = []
        for key, buffer in self.buffers.items():
            rank = expert_dp_rank if key.is_expert else dp_rank
            shards, placed = self.shards(key), self._placed(key)
            for start, stop in buffer.buckets:
                size = (stop - start) // shards
                low = start + rank * size
                found.extend(_piece(key, run) for run in self._runs(_between(placed, low, low + size)))
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

    def _placed(self, key: BufferKey) -> _Placed:
        """Return where the parameters of a buffer begin, in order, and for each `(first, last, parameter)`."""
        if key not in self._sorted:
            ranges = self.buffers[key].param_ranges
            places = sorted(
                ((*ranges[name], self.specs[name]) for name in ranges if name in self.specs),
                key=lambda place: place[:2],
            )
            self._sorted[key] = [first for first, _, _ in places], places
        return self._sorted[key]


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


def _piece(key: BufferKey, run: Sequence[_Slice]) -> PieceSpec:
    begin, end = run[0][0], run[-1][1]
    members = tuple(
        (start - begin, spec.shard(start - first, stop - first)) for start, stop, first, spec in run
    )
    return PieceSpec(run[0][3].group, (end - begin,), members, (key, begin, end))
