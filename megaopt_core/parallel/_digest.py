"""A digest of tensors' bits: equal bits give equal digests on every device, in one pass over the memory.

A sum of 64-bit words does not depend on the order in which a kernel adds, and wraps around without losing anything.
Words are added in columns of small blocks, so that their position counts; the sums, of which there are few, are mixed
by multiplication with odd numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import torch

__all__ = ["digest_of_tensors"]

_ROWS = 32
"""Rows that are added up: few enough for a block to stay in the cache."""

_COLUMNS = (1021, 61)
"""Words of a row, in large blocks and in those of what is left: primes, so that what moves changes its column."""

_PIECE = 64 * _ROWS * _COLUMNS[0]
"""Words that are worked on at a time."""

_SMALL = 1 << 18
"""Bytes below which tensors are put together before anything is computed."""

_TOGETHER = 1 << 20
"""Bytes of small tensors that are put together at a time."""

_ODD = -7046029254386353131  # 2**64 divided by the golden ratio: the multiples of it are spread evenly


def digest_of_tensors(tensors: Iterable[torch.Tensor]) -> bytes:
    """Return a digest of the bits of tensors, in their order.

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
    with torch.no_grad():
        sums = [total for flat in _flat(tensors) for total in _sums_of(flat)]
    by_device: dict[torch.device, list[int]] = {}
    for position, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(position)
    values = [0] * len(sums)
    for positions in by_device.values():
        told = torch.stack([sums[position] for position in positions]).tolist()
        for position, value in zip(positions, told, strict=True):
            values[position] = value
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


def _flat(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield one-dimensional tensors: large ones each by itself, small neighbours of one dtype and device together."""
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        data, bytes_ = tensor.detach(), tensor.nbytes
        other_kind = waiting and (data.dtype, data.device) != (waiting[0].dtype, waiting[0].device)
        if waiting and (other_kind or bytes_ >= _SMALL or size >= _TOGETHER):
            yield _together(waiting)
            waiting, size = [], 0
        if bytes_ >= _SMALL:
            yield data.reshape(-1).contiguous()
        else:
            waiting.append(data)
            size += bytes_
    if waiting:
        yield _together(waiting)


def _together(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)
    return flat


def _sums_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield numbers that depend on every word of a flat tensor."""
    words = _words_of(flat)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        for columns in _COLUMNS:
            whole = piece.numel() // (_ROWS * columns) * (_ROWS * columns)
            if whole:
                blocks = piece[:whole].view(-1, _ROWS, columns)
                yield _mixed(blocks.sum(1).view(-1))
                if flat.element_size() >= 8:
                    # The signs are the highest bits, of which a sum of an even number keeps nothing.
                    yield _mixed((blocks >> 32).sum(1).view(-1))
                piece = piece[whole:]
        if piece.numel():
            yield _mixed(piece)


def _words_of(flat: torch.Tensor) -> torch.Tensor:
    """Return the bits of a flat tensor as 64-bit words, the last one filled up with zeros."""
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).view(-1)
    if flat.nbytes % 8 or flat.data_ptr() % 8:
        padded = flat.new_zeros(-(-flat.nbytes // 8) * 8 // flat.element_size())
        padded[: flat.numel()] = flat
        flat = padded
    return flat.view(torch.int64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on every word and its position."""
    return ((words >> 32).bitwise_xor_(words)).mul_(_odd_numbers(words.device)[: words.numel()]).sum()


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(1, 2 * _PIECE // _ROWS, 2, device=device).mul_(_ODD)
