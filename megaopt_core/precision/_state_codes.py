"""States in codes as data: how a checkpoint saves one, what is read of it, and how ours are laid out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

__all__ = [
    "BLOCK",
    "BLOCKS",
    "SCALED",
    "CodedState",
    "Decoder",
    "StoredSlice",
    "block_magnitudes",
    "decode_slices",
    "scale_key",
]

SCALED = "scaled"
"""The code of fp16 and fp8 states: `value = stored * scale`, with one scale a tensor."""

BLOCKS = "blocks"
"""The code of 8-bit states: `value = magnitude of the code * scale of the block`; negative ones have 128 added."""

BLOCK = 256
"""Elements that share a scale in the code :data:`BLOCKS`: 4 / 256 bytes an element beside the one of its code."""


def scale_key(key: str) -> str:
    """Return the state key under which the scale of a state is kept.

    Args:
        key: of the state.
    """
    return f"{key}_scale"


def block_magnitudes(bits: int) -> tuple[float, ...]:
    """Return the magnitude of every code of :data:`BLOCKS` of so many bits, in rising order; 0 is the first.

    The zeros before a code's first one are the exponent, the bits behind it are the fraction: with `e` zeros and `f`
    of `2**n` fractions, `10**-e * (0.1 + 0.9 * (f + 1) / 2**n)`. Ranges join, the largest is exactly 1.

    Args:
        bits: 8 for states that are never negative, 7 for the others.

    Example:
        >>> len(block_magnitudes(8)), block_magnitudes(7)[-1]
        (256, 1.0)
    """
    values = [0.0]
    for zeros in reversed(range(bits)):
        count = 2 ** (bits - 1 - zeros)
        values += [10.0**-zeros * (0.1 + 0.9 * (index + 1) / count) for index in range(count)]
    return tuple(values)


@frozen(eq=False)
class CodedState:
    """A state in a code, as a checkpoint saves it: one stored element for every element of the piece, and numbers.

    A checkpoint cuts it where parameters begin and end; it asks for the parts when it writes them.

    Args:
        code: the code's name, under which a :data:`Decoder` is found.
        dtype: of the stored elements.
        device: where they are.
        elements: `(start, stop)` to the stored elements of this range of the flattened piece, flat.
        values: `(start, stop)` to all else that decoding this range needs: what a checkpoint can hold, by name.
    """

    code: str
    dtype: torch.dtype
    device: torch.device
    elements: Callable[[int, int], torch.Tensor]
    values: Callable[[int, int], Mapping[str, Any]]


@frozen(eq=False)
class StoredSlice:
    """Consecutive elements of a state as they were saved, and where they go.

    A slice need not be the whole range that was saved together: another layout asks for a part of it.

    Args:
        start: where the first one goes in the flattened piece.
        elements: as they were stored, flat.
        code: name of their code; None: they are values.
        values: what :class:`CodedState` gave for the range that was saved.
        first: position of the first one in that range.
        count: number of elements of that range.
        decode: the code's decoder; None where there is no code.
    """

    start: int
    elements: torch.Tensor
    code: str | None = None
    values: Mapping[str, Any] = {}
    first: int = 0
    count: int = 0
    decode: Decoder | None = None

    @property
    def stop(self) -> int:
        """Position behind the last one in the flattened piece."""
        return self.start + self.elements.numel()

    @property
    def is_whole(self) -> bool:
        """True when it is all of what was saved together."""
        return self.first == 0 and self.elements.numel() == self.count

    def decoded(self) -> torch.Tensor:
        """Return the values in fp32, flat."""
        return self.elements.float() if self.decode is None else self.decode(self)


type Decoder = Callable[[StoredSlice], torch.Tensor]
"""Returns the fp32 values of a slice, flat."""


def decode_slices(slices: Sequence[StoredSlice], like: torch.Tensor) -> torch.Tensor:
    """Return the values of a piece in fp32: 0 where there is no slice.

    Args:
        slices: what was saved.
        like: a tensor of the piece's shape and device.
    """
    values = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    flat = values.view(-1)
    for stored in slices:
        flat[stored.start : stored.stop] = stored.decoded()
    return values
