"""Sums of boxes in files, computed by several threads: long boxes leaf by leaf, short neighbours in one read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from attrs import frozen

from megaopt_checkpoint.algorithms import ALGORITHMS, LEAF, Algorithm, BoxSum
from megaopt_checkpoint.folder import HeldFile

__all__ = ["sum_of", "sums", "threads"]

_BLOCK = 2**18
"""Bytes that are read and summed up at a time: they are still in the processor's cache."""

_TASK = 2**23
"""Bytes that one thread takes at a time, at least."""

_MOST_THREADS = 4

_own = threading.local()


@frozen
class _Leaf:
    """A range of a file that is summed up by itself."""

    box: int
    position: int
    length: int

    @property
    def end(self) -> int:
        return self.position + self.length


def threads() -> ThreadPoolExecutor:
    """Return threads that compute sums; Python lets go of its lock while they read and compute."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    several = min(usable or 1, _MOST_THREADS) if hasattr(os, "preadv") else 1
    return ThreadPoolExecutor(several, thread_name_prefix="megaopt-verify")


def sum_of(memory: memoryview, algorithm: str) -> str:
    """Return the sum of a box in memory.

    Args:
        memory: its bytes.
        algorithm: the name of the sum.

    Example:
        >>> sum_of(memoryview(b"123456789"), "crc32")
        'cbf43926'
    """
    box = BoxSum(algorithm)
    box.update(memory)
    return box.text()


def sums(
    file: HeldFile, ranges: Sequence[tuple[int, int]], pool: ThreadPoolExecutor, algorithm: str
) -> list[str | None]:
    """Return the sums of ranges of a file, each byte read once; None for one that the file ends in.

    Args:
        file: an open file.
        ranges: position and length of each, ascending.
        pool: what :func:`threads` returned.
        algorithm: the name of the sum.
    """
    how = ALGORITHMS[algorithm]
    leaves: list[list[tuple[int, int]]] = [[] for _ in ranges]
    torn: set[int] = set()
    tasks = list(_tasks(ranges))
    for task, values in zip(tasks, pool.map(lambda some: _of_leaves(file, some, how), tasks), strict=True):
        for leaf, value in zip(task, values, strict=True):
            if value is None:
                torn.add(leaf.box)
            else:
                leaves[leaf.box].append((value, leaf.length))
    return [None if box in torn else how.text(of_box) for box, of_box in enumerate(leaves)]


def _tasks(ranges: Sequence[tuple[int, int]]) -> Iterator[list[_Leaf]]:
    """Yield leaves for one thread each: one of a long box, or many short ones."""
    task: list[_Leaf] = []
    size = 0
    for box, (start, length) in enumerate(ranges):
        for done in range(0, length, LEAF):
            leaf = _Leaf(box, start + done, min(length - done, LEAF))
            task.append(leaf)
            size += leaf.length
            if size >= _TASK:
                yield task
                task, size = [], 0
    if task:
        yield task


def _of_leaves(file: HeldFile, leaves: Sequence[_Leaf], algorithm: Algorithm) -> list[int | None]:
    """Return the sum of each leaf; neighbours are read together."""
    stops = [leaves[-1].end]
    for leaf, after in zip(reversed(leaves[:-1]), reversed(leaves[1:]), strict=True):
        stops.append(stops[-1] if leaf.end == after.position else leaf.end)
    window = _Window(file, _buffer())
    return [window.sum(leaf, stop, algorithm) for leaf, stop in zip(leaves, reversed(stops), strict=True)]


def _buffer() -> memoryview:
    """Return this thread's block of memory, the same one every time."""
    if getattr(_own, "size", None) != _BLOCK:
        _own.size, _own.memory = _BLOCK, memoryview(bytearray(_BLOCK))
    memory: memoryview = _own.memory
    return memory


class _Window:
    """A block of a file in memory, which moves on where a leaf needs more.

    Args:
        file: an open file.
        memory: where the block is.
    """

    def __init__(self, file: HeldFile, memory: memoryview) -> None:
        self._file = file
        self._memory = memory
        self._start = self._end = -1

    def sum(self, leaf: _Leaf, stop: int, algorithm: Algorithm) -> int | None:
        """Return the sum of a leaf, None where the file ends in it.

        Args:
            leaf: the range.
            stop: the position up to which neighbours may be read with it.
            algorithm: the sum.
        """
        position, running = leaf.position, algorithm.start()
        while position < leaf.end:
            if not self._start <= position < self._end:
                wanted = self._memory[: min(stop - position, len(self._memory))]
                self._start, self._end = position, position + self._file.read_into(position, wanted)
                if self._end == position:
                    return None
            end = min(leaf.end, self._end)
            running.update(self._memory[position - self._start : end - self._start])
            position = end
        return running.intdigest()
