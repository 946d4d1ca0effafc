"""Bits of tensors as 64-bit words, and odd numbers to mix them with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

__all__ = ["odd_numbers", "words_of"]

_ODD = -7046029254386353131
"""2**64 divided by the golden ratio: its multiples are spread evenly."""

_SCRAMBLE = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shifts and factors of splitmix64 (Steele, Lea and Flood, 2014): multiples of :data:`_ODD` lose their pattern."""


def words_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
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


def odd_numbers(bits: int, device: torch.device) -> torch.Tensor:
    """Return 2**bits odd numbers without a pattern, the same on every device.

    Args:
        bits: how many, as a power of two.
        device: where they lie.
    """
    numbers = torch.arange(1, 1 + (1 << bits), device=device).mul_(_ODD)
    for shift, factor in _SCRAMBLE:
        numbers.bitwise_xor_((numbers >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
    return numbers.bitwise_or_(1)
