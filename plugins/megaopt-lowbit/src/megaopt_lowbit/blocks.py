"""State tensors in 8 bits: dynamic exponent codes, with one fp32 scale for every 256 elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from attrs import frozen

from megaopt_core import StoredSlice
from megaopt_core.precision import BLOCK, BLOCKS, StoredTensor, block_magnitudes, scale_key

__all__ = ["BlockCode", "decode_blocks"]


@cache
def _magnitudes(bits: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(block_magnitudes(bits), dtype=torch.float64).float().to(device)


@cache
def _table(positive: bool, device: torch.device) -> torch.Tensor:
    """Return the value of each of the 256 codes: all of them positive, or half of them negative."""
    layout = StoredTensor(torch.uint8, BLOCKS, is_positive=positive)
    return torch.tensor(layout.values, dtype=torch.float64).float().to(device)


@cache
def _midpoints(bits: int, device: torch.device) -> torch.Tensor:
    values = _magnitudes(bits, device)
    return (values[1:] + values[:-1]) / 2


@frozen
class BlockCode:
    """Stores a state in a byte an element: a dynamic exponent code, times the largest magnitude of its block.

    Blocks are consecutive elements of the flattened tensor. What was decoded encodes to the same bytes again: the
    largest element of a block is kept exactly. A block that holds what is not finite decodes to nothing finite.

    Args:
        positive: no value is negative; all codes are positive then, and a positive value is never stored as 0.
        stochastic: round up or down at random, so that no small change is lost on average.

    Example:
        >>> stored, scale = BlockCode().encode(torch.tensor([0.5, -2.0]))
        >>> stored.dtype, scale, BlockCode().decode(stored, scale)
        (torch.uint8, tensor([2.]), tensor([ 0.5094, -2.0000]))
    """

    name: ClassVar[str] = BLOCKS
    positive: bool = False
    stochastic: bool = False

    def encode(
        self, value: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes, of the value's shape, and the scale of every block.

        Args:
            value: fp32.
            entropy: fp32; its bits and the value's make the choice where rounding is stochastic, so that equal
                replicas choose alike and a resumed run as one that never stopped. None: round to nearest.
        """
        flat = value.detach().reshape(-1)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        scale = blocks.abs().amax(1)
        spread = torch.where(scale == 0, torch.ones_like(scale), scale)
        size = (blocks.abs() / spread[:, None]).view(-1)[: flat.numel()]
        codes = self._codes(size, flat, entropy if self.stochastic else None)
        if self.positive:
            codes = torch.where((flat > 0) & (codes == 0), 1, codes)
        else:
            codes = torch.where((flat < 0) & (codes > 0), codes + 128, codes)
        return codes.to(torch.uint8).view(value.shape), scale

    def _codes(self, size: torch.Tensor, flat: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
        bits = 8 if self.positive else 7
        if entropy is None:
            return torch.bucketize(size, _midpoints(bits, size.device), out_int32=True)
        values = _magnitudes(bits, size.device)
        above = torch.bucketize(size, values, out_int32=True).clamp_(max=len(values) - 1)
        below = (above - 1).clamp_(min=0)
        gap = values[above] - values[below]
        share = (size - values[below]) / torch.where(gap == 0, torch.ones_like(gap), gap)
        mixed = (flat, entropy.reshape(-1)) if entropy.numel() == flat.numel() else (flat,)
        return torch.where(_noise(*mixed) < share, above, below)

    def decode(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the values in fp32.

        Args:
            stored: the codes.
            scale: of every block.
        """
        values = self.saved(scale, 0, stored.numel())
        return decode_blocks(StoredSlice(0, stored.reshape(-1), BLOCKS, values)).view(stored.shape)

    def stored(self, key: str) -> StoredTensor:
        """Return the layout.

        Args:
            key: of the state.
        """
        return StoredTensor(torch.uint8, BLOCKS, scale_key(key), BLOCK, self.positive)

    def saved(self, scale: Any, start: int, stop: int) -> Mapping[str, Any]:
        """Return what decoding a range of elements needs.

        Args:
            scale: of every block.
            start: position of the first element.
            stop: position behind the last one.
        """
        return {
            "scale": scale[start // BLOCK : -(-stop // BLOCK)],
            "lead": start % BLOCK,
            "positive": self.positive,
        }

    def common_scale(self, slices: Sequence[StoredSlice], like: torch.Tensor) -> torch.Tensor | None:
        """Return the scale of every block of a piece into which slices go as they are; None: they are encoded anew.

        Args:
            slices: what was saved.
            like: a tensor of the piece's shape and device.
        """
        scale = torch.zeros(-(-like.numel() // BLOCK), device=like.device)
        known = torch.zeros_like(scale, dtype=torch.bool)
        for part in slices:
            if part.code != BLOCKS or bool(part.values["positive"]) != self.positive:
                return None
            at = int(part.values["lead"]) + part.first
            if (part.start - at) % BLOCK:
                return None
            shift = (part.start - at) // BLOCK
            first, last = at // BLOCK, -(-(at + part.elements.numel()) // BLOCK)
            found = torch.as_tensor(part.values["scale"], device=like.device).reshape(-1)[first:last]
            where = slice(first + shift, last + shift)
            if (known[where] & (scale[where] != found)).any():
                return None
            scale[where], known[where] = found, True
        return scale


def decode_blocks(stored: StoredSlice) -> torch.Tensor:
    """Return the values of elements that begin anywhere in what was saved together: what reads the code `"blocks"`.

    Args:
        stored: its `values` are what :meth:`BlockCode.saved` gives.
    """
    device = stored.elements.device
    scale = torch.as_tensor(stored.values["scale"], device=device).reshape(-1)
    at = int(stored.values["lead"]) + stored.first
    blocks = torch.arange(at, at + stored.elements.numel(), device=device) // BLOCK
    table = _table(bool(stored.values["positive"]), device)
    return table[stored.elements.int()] * scale[blocks]


def _noise(*tensors: torch.Tensor) -> torch.Tensor:
    """Return numbers from 0 to 1 that look random, made of the bits of fp32 tensors and of positions."""
    mixed = torch.arange(tensors[0].numel(), device=tensors[0].device)
    for tensor in tensors:
        mixed = (mixed * 0x9E3779B1 + tensor.contiguous().view(torch.int32)) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).float() / 2**24
