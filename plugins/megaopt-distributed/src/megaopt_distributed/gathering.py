"""When which bucket of parameters is gathered."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from attrs import define, field, frozen

from megaopt_core.sharding import BufferKey, PieceSpec
from megaopt_distributed.buffers.bucket import Bucket

__all__ = ["GatheredBucket", "Gathering"]


@frozen(eq=False)
class GatheredBucket:
    """A bucket and who steps parameters in it.

    Args:
        bucket: gathers itself.
        key: its buffer.
        start: where it begins in its buffer.
        groups: the groups that have parameters in it, on any rank.
        is_awaited_in_forward: forward hooks wait for it.
    """

    bucket: Bucket
    key: BufferKey
    start: int
    groups: frozenset[int]
    is_awaited_in_forward: bool = False


@define(eq=False)
class Gathering:
    """Gathers each bucket once a step: when all groups with parameters in it have been stepped.

    Args:
        buckets: all buckets, in the order of memory.
    """

    buckets: Sequence[GatheredBucket]
    _missing: list[set[int]] = field(init=False)
    _starts: dict[BufferKey, tuple[list[int], list[int]]] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self._missing = [set(gathered.groups) for gathered in self.buckets]
        for index, gathered in enumerate(self.buckets):
            starts, indices = self._starts.setdefault(gathered.key, ([], []))
            starts.append(gathered.start)
            indices.append(index)

    def buckets_with(self, groups: Collection[int]) -> list[int]:
        """Return the buckets that hold parameters of these groups, last first: the forward pass begins with the last.

        Args:
            groups: indices of groups.
        """
        found = [index for index, each in enumerate(self.buckets) if not each.groups.isdisjoint(groups)]
        return found[::-1]

    def bucket_at(self, spec: PieceSpec) -> int | None:
        """Return the bucket that a piece lies in.

        Args:
            spec: the piece.
        """
        if spec.buffer is None:
            return None
        key, begin, _ = spec.buffer
        starts, indices = self._starts[key]
        return indices[bisect_right(starts, begin) - 1]

    def stepped(self, bucket: int, groups: Collection[int]) -> None:
        """Begin to gather a bucket if these were the last groups that it waited for.

        Args:
            bucket: its position.
            groups: the groups that were stepped.
        """
        self._missing[bucket].difference_update(groups)
        if not self._missing[bucket]:
            gathered = self.buckets[bucket]
            gathered.bucket.start_param_sync()
            self._missing[bucket] = set(gathered.groups)

    def finish(self) -> None:
        """Wait for everything that is being gathered."""
        for gathered in reversed(self.buckets):
            gathered.bucket.finish_param_sync()

    def finish_what_forward_does_not(self) -> None:
        """Wait for the buckets that no forward hook waits for."""
        for gathered in reversed(self.buckets):
            if not gathered.is_awaited_in_forward:
                gathered.bucket.finish_param_sync()
