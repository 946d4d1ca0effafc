"""The sums that stand in manifests: a few digits that tell whether the bytes of a box are still the same."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Protocol

import xxhash
from attrs import frozen

__all__ = ["ALGORITHMS", "LEAF", "OLDEST", "Algorithm", "BoxSum", "combined"]

LEAF = 2**23
"""Bytes of a box that are summed up by themselves: threads share a long box, and a reader may begin in its midst."""

OLDEST = "crc32"
"""What manifests of formats 1 to 3 have; they do not say it."""

_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits in the order in which zlib has them
_ONE = 1 << 31


class _Running(Protocol):
    """A sum of what has been seen so far."""

    def update(self, memory: memoryview, /) -> None: ...

    def intdigest(self) -> int: ...


@frozen
class Algorithm:
    """One way to sum up a box.

    Args:
        name: in the manifest.
        digits: of a sum, hexadecimal.
        start: makes the running sum of a leaf.
        join: the box's sum of its leaves' `(sum, length)`, in their order.
    """

    name: str
    digits: int
    start: Callable[[], _Running]
    join: Callable[[Iterable[tuple[int, int]]], int]

    def text(self, leaves: Iterable[tuple[int, int]]) -> str:
        """Return the sum of a box as the manifest has it.

        Args:
            leaves: sum and length of each leaf of :data:`LEAF` bytes; the last one may be shorter.
        """
        return f"{self.join(leaves):0{self.digits}x}"


class BoxSum:
    """The sum of a box whose bytes come one block after the other.

    Args:
        algorithm: its name.

    Example:
        >>> box = BoxSum("crc32")
        >>> for block in (b"1234", b"56789"):
        ...     box.update(memoryview(block))
        >>> box.text()
        'cbf43926'
    """

    def __init__(self, algorithm: str) -> None:
        self._algorithm = ALGORITHMS[algorithm]
        self._leaves: list[tuple[int, int]] = []
        self._leaf = self._algorithm.start()
        self._length = 0

    def update(self, block: memoryview) -> None:
        """Take the next bytes.

        Args:
            block: of the box.
        """
        while block:
            some = block[: LEAF - self._length]
            self._leaf.update(some)
            self._length += len(some)
            block = block[len(some) :]
            if self._length == LEAF:
                self._end_leaf()

    def _end_leaf(self) -> None:
        self._leaves.append((self._leaf.intdigest(), self._length))
        self._leaf, self._length = self._algorithm.start(), 0

    def text(self) -> str:
        """Return the sum of all bytes, as the manifest has it."""
        if self._length:
            self._end_leaf()
        return self._algorithm.text(self._leaves)


class _Crc32:
    """CRC-32 as a running sum."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, memory: memoryview) -> None:
        self._value = zlib.crc32(memory, self._value)

    def intdigest(self) -> int:
        return self._value


def _joined_crc32(leaves: Iterable[tuple[int, int]]) -> int:
    value = 0
    for after, length in leaves:
        value = combined(value, after, length)
    return value


def _joined_xxh3(leaves: Iterable[tuple[int, int]]) -> int:
    """Return the XXH3 of the leaves' sums, eight bytes each, the most significant first."""
    return xxhash.xxh3_64_intdigest(b"".join(value.to_bytes(8, "big") for value, _ in leaves))


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


ALGORITHMS = {
    known.name: known
    for known in (
        Algorithm(OLDEST, 8, _Crc32, _joined_crc32),
        Algorithm("xxh3-64", 16, xxhash.xxh3_64, _joined_xxh3),
    )
}
"""What a manifest may name; `CHECKSUMS` of the core's format is what is written."""
