"""Sums of boxes: a few digits that tell whether bytes are still the same, computed by several threads.

A long box is summed up leaf by leaf, short neighbours are read together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash
from attrs import frozen

from megaopt_checkpoint.folder import HeldFile

__all__ = ["DIGITS", "BoxSum", "sum_of", "sums", "threads"]

DIGITS = 16
"""Hexadecimal digits of a sum."""

_LEAF = 2**23
"""Bytes of a box that are summed up by themselves: threads share a long box, and a reader may begin in its midst."""

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


def _joined(leaves: Iterable[int]) -> str:
    """Return the sum of a box: the XXH3 of its leaves' sums, eight bytes each, the most significant first."""
    return xxhash.xxh3_64_hexdigest(b"".join(value.to_bytes(8, "big") for value in leaves))


class BoxSum:
    """The sum of a box whose bytes come one block after the other.

    Example:
        >>> box = BoxSum()
        >>> for block in (b"1234", b"56789"):
        ...     box.update(memoryview(block))
        >>> box.text() == sum_of(memoryview(b"123456789"))
        True
    """

    def __init__(self) -> None:
        self._leaves: list[int] = []
        self._leaf = xxhash.xxh3_64()
        self._length = 0

    def update(self, block: memoryview) -> None:
        """Take the next bytes.

        Args:
            block: of the box.
        """
        while block:
            some = block[: _LEAF - self._length]
            self._leaf.update(some)
            self._length += len(some)
            block = block[len(some) :]
            if self._length == _LEAF:
                self._end_leaf()

    def _end_leaf(self) -> None:
        self._leaves.append(self._leaf.intdigest())
        self._leaf, self._length = xxhash.xxh3_64(), 0

    def text(self) -> str:
        """Return the sum of all bytes, as the manifest has it."""
        if self._length:
            self._end_leaf()
        return _joined(self._leaves)


def sum_of(memory: memoryview) -> str:
    """Return the sum of a box in memory.

    Args:
        memory: its bytes.

    Example:
        >>> sum_of(memoryview(b""))
        '2d06800538d394c2'
    """
    box = BoxSum()
    box.update(memory)
    return box.text()


def sums(file: HeldFile, ranges: Sequence[tuple[int, int]], pool: ThreadPoolExecutor) -> list[str | None]:
    """Return the sums of ranges of a file, each byte read once; None for one that the file ends in.

    Args:
        file: an open file.
        ranges: position and length of each, ascending.
        pool: the threads that :func:`threads` returned.
    """
    leaves: list[list[int]] = [[] for _ in ranges]
    torn: set[int] = set()
    tasks = list(_tasks(ranges))
    for task, values in zip(tasks, pool.map(lambda some: _of_leaves(file, some), tasks), strict=True):
        for leaf, value in zip(task, values, strict=True):
            if value is None:
                torn.add(leaf.box)
            else:
                leaves[leaf.box].append(value)
    return [None if box in torn else _joined(of_box) for box, of_box in enumerate(leaves)]


def _tasks(ranges: Sequence[tuple[int, int]]) -> Iterator[list[_Leaf]]:
    """Yield leaves for one thread each: one of a long box, or many short ones."""
    task: list[_Leaf] = []
    size = 0
    for box, (start, length) in enumerate(ranges):
        for done in range(0, length, _LEAF):
            leaf = _Leaf(box, start + done, min(length - done, _LEAF))
            task.append(leaf)
            size += leaf.length
            if size >= _TASK:
                yield task
                task, size = [], 0
    if task:
        yield task


def _of_leaves(file: HeldFile, leaves: Sequence[_Leaf]) -> list[int | None]:
    """Return the sum of each leaf; neighbours are read together."""
    stops = [leaves[-1].end]
    for leaf, after in zip(reversed(leaves[:-1]), reversed(leaves[1:]), strict=True):
        stops.append(stops[-1] if leaf.end == after.position else leaf.end)
    window = _Window(file, _buffer())
    return [window.sum(leaf, stop) for leaf, stop in zip(leaves, reversed(stops), strict=True)]


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

    def sum(self, leaf: _Leaf, stop: int) -> int | None:
        """Return the sum of a leaf, None where the file ends in it.

        Args:
            leaf: the range.
            stop: the position up to which neighbours may be read with it.
        """
        position, running = leaf.position, xxhash.xxh3_64()
        while position < leaf.end:
            if not self._start <= position < self._end:
                wanted = self._memory[: min(stop - position, len(self._memory))]
                self._start, self._end = position, position + self._file.read_into(position, wanted)
                if self._end == position:
                    return None
            end = min(leaf.end, self._end)
            running.update(self._memory[position - self._start : end - self._start])
            position = end
        return int(running.intdigest())
