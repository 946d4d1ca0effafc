"""Checksums of boxes in a file, computed by several threads: long boxes in pieces, short neighbours in one read."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from attrs import frozen

from megaopt_checkpoint.folder import HeldFile

__all__ = ["combined", "crc32s", "threads"]

_BLOCK = 2**20
"""Bytes that are read and summed up at a time: they are still in the processor's cache."""

_TASK = 2**23
"""Bytes that one thread takes at a time."""

_MOST_THREADS = 4

_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits in the order in which zlib has them
_ONE = 1 << 31


@frozen
class _Piece:
    """A range of a file that belongs to one box."""

    box: int
    position: int
    length: int

    @property
    def end(self) -> int:
        return self.position + self.length


def threads() -> ThreadPoolExecutor:
    """Return threads that compute checksums; Python lets go of its lock while they read and compute."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    several = min(usable or 1, _MOST_THREADS) if hasattr(os, "preadv") else 1
    return ThreadPoolExecutor(several, thread_name_prefix="megaopt-verify")


def crc32s(file: HeldFile, ranges: Sequence[tuple[int, int]], pool: ThreadPoolExecutor) -> list[int | None]:
    """Return the CRC-32 of ranges of a file, each byte read once; None for one that the file ends in.

    Args:
        file: an open file.
        ranges: position and length of each, ascending.
        pool: what :func:`threads` returned.
    """
    tasks = list(_tasks(ranges))
    found: list[int | None] = [0] * len(ranges)
    for task, values in zip(tasks, pool.map(lambda pieces: _of_pieces(file, pieces), tasks), strict=True):
        for piece, value in zip(task, values, strict=True):
            before = found[piece.box]
            known = before is not None and value is not None
            found[piece.box] = combined(before or 0, value or 0, piece.length) if known else None
    return found


def combined(first: int, second: int, length: int) -> int:
    r"""Return the CRC-32 of two texts, one after the other: $c_1 x^{8n} + c_2$ modulo the polynomial.

    Args:
        first: the CRC-32 of the first.
        second: the CRC-32 of the second.
        length: bytes of the second.

    Example:
        >>> import zlib
        >>> combined(zlib.crc32(b"mega"), zlib.crc32(b"opt"), 3) == zlib.crc32(b"megaopt")
        True
    """
    return _product(_power(length), first) ^ second if first else second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials modulo that of CRC-32."""
    result, bit = 0, _ONE
    while one:
        if one & bit:
            result ^= other
            one ^= bit
        bit >>= 1
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
    return result


@cache
def _power(count: int) -> int:
    """Return x to the power of 8 times a count, modulo the polynomial."""
    result, square = _ONE, _ONE >> 8
    while count:
        if count & 1:
            result = _product(square, result)
        count, square = count >> 1, _product(square, square)
    return result


def _tasks(ranges: Sequence[tuple[int, int]]) -> Iterator[list[_Piece]]:
    """Yield pieces for one thread each: parts of a long box, or many short ones."""
    task: list[_Piece] = []
    size = 0
    for box, (start, length) in enumerate(ranges):
        done = 0
        while done < length:
            taken = min(length - done, _TASK - size)
            task.append(_Piece(box, start + done, taken))
            done, size = done + taken, size + taken
            if size == _TASK:
                yield task
                task, size = [], 0
    if task:
        yield task


def _of_pieces(file: HeldFile, pieces: Sequence[_Piece]) -> list[int | None]:
    """Return the CRC-32 of each piece; neighbours are read together."""
    stops = [pieces[-1].end]
    for piece, after in zip(reversed(pieces[:-1]), reversed(pieces[1:]), strict=True):
        stops.append(stops[-1] if piece.end == after.position else piece.end)
    window = _Window(file, min(_BLOCK, sum(piece.length for piece in pieces)))
    return [window.crc32(piece, stop) for piece, stop in zip(pieces, reversed(stops), strict=True)]


class _Window:
    """A block of a file in memory, which moves on where a piece needs more.

    Args:
        file: an open file.
        size: of the block.
    """

    def __init__(self, file: HeldFile, size: int) -> None:
        self._file = file
        self._memory = memoryview(bytearray(size))
        self._start = self._end = -1

    def crc32(self, piece: _Piece, stop: int) -> int | None:
        """Return the CRC-32 of a piece, None where the file ends in it.

        Args:
            piece: the range.
            stop: the position up to which neighbours may be read with it.
        """
        position, crc32 = piece.position, 0
        while position < piece.end:
            if not self._start <= position < self._end:
                wanted = self._memory[: min(stop - position, len(self._memory))]
                self._start, self._end = position, position + self._file.read_into(position, wanted)
                if self._end == position:
                    return None
            end = min(piece.end, self._end)
            crc32 = zlib.crc32(self._memory[position - self._start : end - self._start], crc32)
            position = end
        return crc32
