"""Which flat pieces of which buckets each rank steps, as pure data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from attrs import define, field

from megaopt_core.params.specs import ParamSpec
from megaopt_core.sharding.layout import BufferKey, GradReduction, PerBufferParamLayout, PieceSpec, World

__all__ = ["FlatLayout"]


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
    _sorted: dict[BufferKey, tuple[list[int], list[ParamSpec]]] = field(factory=dict, init=False)

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
            for start, stop in buffer.buckets:
                size = (stop - start) // self.shards(key)
                found.extend(self._runs(key, start + rank * size, start + (rank + 1) * size))
        return found

    def _runs(self, key: BufferKey, low: int, high: int) -> Iterator[PieceSpec]:
        run: list[tuple[int, int, ParamSpec]] = []
        for start, stop, spec in self._overlaps(key, low, high):
            joins = self.fused and run and run[-1][1] == start and run[-1][2].group == spec.group
            if run and not joins:
                yield self._piece(key, run)
                run = []
            run.append((start, stop, spec))
        if run:
            yield self._piece(key, run)

    def _piece(self, key: BufferKey, run: Sequence[tuple[int, int, ParamSpec]]) -> PieceSpec:
        ranges = self.buffers[key].param_ranges
        begin, end = run[0][0], run[-1][1]
        members = []
        for start, stop, spec in run:
            first = ranges[spec.name][0]
            members.append((start - begin, spec.shard(start - first, stop - first)))
        return PieceSpec(run[0][2].group, (end - begin,), tuple(members), (key, begin, end))

    def _overlaps(self, key: BufferKey, low: int, high: int) -> Iterator[tuple[int, int, ParamSpec]]:
        """Yield `(start, stop, parameter)` of what lies in `[low, high)` of a buffer."""
        starts, specs = self._in_order(key)
        ranges = self.buffers[key].param_ranges
        for spec in specs[max(bisect_right(starts, low) - 1, 0) :]:
            first, last = ranges[spec.name]
            if first >= high:
                break
            if max(first, low) < min(last, high):
                yield max(first, low), min(last, high), spec

    def _in_order(self, key: BufferKey) -> tuple[list[int], list[ParamSpec]]:
        if key not in self._sorted:
            ranges = self.buffers[key].param_ranges
            names = sorted((name for name in ranges if name in self.specs), key=lambda name: ranges[name])
            self._sorted[key] = [ranges[name][0] for name in names], [self.specs[name] for name in names]
        return self._sorted[key]
