"""When a bucket's gradients are complete, learned from the backward passes before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from megaopt_distributed.buffers.bucket import Bucket

__all__ = ["ReadyBuckets"]


@define(eq=False)
class ReadyBuckets:
    """Starts to reduce the buckets of one process group in a fixed order, each as soon as it is complete.

    Autograd hands a parameter's gradient over once in most models, more often where reentrant activation checkpointing
    runs a tied layer's backward in several parts, and never where a parameter is not used. The first synchronised
    backward pass is therefore only counted; from the second on a bucket is complete when every parameter has been seen
    as often as in any pass before, at least once. What never completes, and what comes after it, is reduced when
    synchronisation is finished. All ranks start buckets in the same order, as collectives have to.

    Args:
        buckets: in the order in which their gradients are ready: the reverse of the model's.
        start: begins to reduce a bucket.
    """

    buckets: Sequence[Bucket]
    start: Callable[[Bucket], None]
    _expected: dict[str, int] = field(factory=dict, init=False)
    _seen: dict[str, int] = field(factory=dict, init=False)
    _incomplete: list[int] = field(init=False)
    _next: int = field(default=0, init=False)
    _index_of: Mapping[str, int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._index_of = {name: index for index, bucket in enumerate(self.buckets) for name in bucket.params}
        self._incomplete = [len(bucket.params) for bucket in self.buckets]

    def accumulated(self, name: str) -> None:
        """Note that a parameter's gradient was added to its buffer; start what is complete.

        Args:
            name: a parameter of one of the buckets.
        """
        self._seen[name] = self._seen.get(name, 0) + 1
        if self._seen[name] == self._expected.get(name, 1):
            self._incomplete[self._index_of[name]] -= 1
        while self._expected and self._next < len(self.buckets) and not self._incomplete[self._next]:
            self.start(self.buckets[self._next])
            self._next += 1

    def start_rest(self) -> None:
        """Start every bucket that was not started yet."""
        for bucket in self.buckets[self._next :]:
            self.start(bucket)
        self._next = len(self.buckets)

    def begin(self) -> None:
        """Begin a new accumulation: learn from the one before."""
        for name, times in self._seen.items():
            self._expected[name] = max(times, self._expected.get(name, 1))
        self._seen.clear()
        self._next = 0
        self._incomplete = [len(bucket.params) for bucket in self.buckets]
