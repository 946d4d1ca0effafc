"""A digest of tensors' bits: equal bits give equal digests on every device, in one pass over the memory.

A sum of 64-bit words does not depend on the order in which a kernel adds, and wraps around without losing anything.
Words are added in columns of small blocks, so that their position counts; the sums, of which there are few, are mixed
by multiplication with odd numbers that have no pattern. Sums alone would not do: where two values rise by one unit in
the last place and two fall, which is what a step does to a short vector, their sum stays what it was.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

__all__ = ["digest_of_each", "digest_of_tensors"]

_ROWS = 31
"""Rows that are added up: few enough for a block to stay in the cache, and an odd number.

Signs of numbers of 64 bits are the highest bits of words, of which a sum keeps only whether their number is odd.
"""

_COLUMNS = 1021
"""Words of a row in what is large: a prime, so that what moves changes its column."""

_LARGE = 8 * _ROWS * _COLUMNS
"""Words from which on there is more than one block; what is left of the last one is little of the whole then."""

_PIECE = 64 * _ROWS * _COLUMNS
"""Words that are worked on at a time."""

_SMALL = 1 << 18
"""Bytes below which tensors are put together before anything is computed."""

_TOGETHER = 1 << 19
"""Bytes of small tensors that are put together at a time: they stay in the cache until they are added up."""

_FEW = 64
"""Words that are not worth adding up."""

_ODD = -7046029254386353131
"""2**64 divided by the golden ratio: its multiples are spread evenly."""

_SCRAMBLE = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shifts and factors of splitmix64 (Steele, Lea and Flood, 2014): multiples of :data:`_ODD` lose their pattern."""


def digest_of_tensors(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of the bits of tensors, in their order among those of one dtype and device.

    Args:
        tensors: any dtypes and devices; one that is not contiguous counts as if it were.

    Example:
        >>> import torch
        >>> weight = torch.arange(6.0)
        >>> digest_of_tensors([weight]) == digest_of_tensors([weight.clone()])
        True
        >>> digest_of_tensors([weight]) == digest_of_tensors([weight.flip(0)])
        False
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        totals = [_totals(some) for some in by_kind.values()]
    return hashlib.blake2b(repr(totals).encode(), digest_size=16).digest()


def digest_of_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a digest of the bits of each tensor by itself, on their device: the host waits for nothing.

    Args:
        tensors: one or more of one device, of any dtypes; one that is not contiguous counts as if it were.

    Example:
        >>> import torch
        >>> weights = [torch.tensor([1.0, -1.0]), torch.tensor([1.5, -1.5])]
        >>> before = digest_of_each(weights)
        >>> _ = weights[1].add_(0.125)
        >>> (digest_of_each(weights) == before).tolist()
        [True, False]
    """
    with torch.no_grad():
        odd = _odd_numbers((2 * _COLUMNS).bit_length(), tensors[0].device)
        return torch.stack([_number_of(tensor.contiguous().view(-1), odd) for tensor in tensors])


def _number_of(flat: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on all words of a flat tensor, as a tensor on its device."""
    sums = [flat.new_zeros(1, dtype=torch.int64)]
    for words in _words_of(flat):
        whole = words.numel() // _COLUMNS * _COLUMNS
        if whole:
            sums.append(words[:whole].view(-1, _COLUMNS).sum(0))
        sums.append(words[whole:])
    return _mixed(torch.cat(sums), odd)


def _mixed(words: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Return one number of words, whose high halves are laid over the low ones: a product carries upwards only."""
    return (words >> 32).bitwise_xor_(words).mul_(odd[: words.numel()]).sum()


def _totals(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the numbers that the tensors of one dtype and device become; what is on a device is read at one time.

    Which way a tensor goes depends on its shape and dtype alone: where it lies is another matter on every rank.
    """
    found = []
    for flat in _flattened(tensors):
        for piece in (piece for words in _words_of(flat) for piece in words.split(_PIECE)):
            sums = _sums_of(piece)
            found.append(_mixed(sums, _kept_odd_numbers(sums.numel().bit_length(), sums.device)))
    numbers: list[int] = torch.stack(found).tolist() if found else []
    return numbers


def _flattened(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors flat, small ones together."""
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.nbytes >= _SMALL:
            yield tensor.contiguous().view(-1)
            continue
        waiting.append(tensor)
        size += tensor.nbytes
        if size >= _TOGETHER:
            yield torch._utils._flatten_dense_tensors(waiting)
            waiting, size = [], 0
    if waiting:
        yield torch._utils._flatten_dense_tensors(waiting)


def _sums_of(words: torch.Tensor) -> torch.Tensor:
    """Return sums of words that lie far apart, one for every few of them."""
    size = words.numel()
    if size <= _FEW:
        return words
    if size >= _LARGE:
        whole = size // (_ROWS * _COLUMNS) * (_ROWS * _COLUMNS)
        return torch.cat([words[:whole].view(-1, _ROWS, _COLUMNS).sum(1).view(-1), words[whole:]])
    columns = _columns_of(size)
    return words.as_strided((_ROWS, size - (_ROWS - 1) * columns), (columns, 1)).sum(0)


@cache
def _columns_of(size: int) -> int:
    """Return how far apart rows of one block begin: without the factors that shapes have."""
    columns = size // _ROWS
    while math.gcd(columns, 2 * 3 * 5 * 7) > 1:
        columns -= 1
    return columns


def _words_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a flat tensor as 64-bit words, those of its end filled up with zeros."""
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).view(-1)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    in_word = 8 // flat.element_size()
    left = flat.numel() % in_word
    if flat.numel() > left:
        yield (flat[:-left] if left else flat).view(torch.int64)
    if left:
        last = flat.new_zeros(in_word)
        last[:left] = flat[-left:]
        yield last.view(torch.int64)


def _odd_numbers(bits: int, device: torch.device) -> torch.Tensor:
    """Return 2**bits odd numbers without a pattern, the same on every device.

    Args:
        bits: how many, as a power of two.
        device: where they lie.
    """
    numbers = torch.arange(1, 1 + (1 << bits), device=device).mul_(_ODD)
    for shift, factor in _SCRAMBLE:
        numbers.bitwise_xor_((numbers >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
    return numbers.bitwise_or_(1)


_kept_odd_numbers = cache(_odd_numbers)
