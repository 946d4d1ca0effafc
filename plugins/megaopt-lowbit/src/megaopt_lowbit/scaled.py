"""State tensors in a narrower floating dtype: bf16 as it is, fp16 and fp8 with one power of two a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import frozen

from megaopt_core import StoredSlice
from megaopt_core.precision import SCALED, StoredTensor, scale_key

__all__ = ["ScaledCode", "decode_scaled", "needs_scale"]

_WIDE_RANGE = 1.0e30
_WITHOUT_INFINITY = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SMALLEST_EXPONENT = -126
"""Below it a scale is no normal fp32 number, and dividing by it is not exact."""


def decode_scaled(stored: StoredSlice) -> torch.Tensor:
    """Return the values of elements that were stored with one scale: what reads the code :data:`SCALED`.

    Args:
        stored: its `values` are `{"scale": number}`.

    Example:
        >>> decode_scaled(StoredSlice(0, torch.tensor([3.0, 0.5]).half(), SCALED, {"scale": 4.0})).tolist()
        [12.0, 2.0]
    """
    return stored.elements.float().mul_(
        torch.as_tensor(stored.values["scale"], device=stored.elements.device)
    )


def needs_scale(dtype: torch.dtype) -> bool:
    """Return whether a dtype's range is so much narrower than fp32's that values are stored with a scale.

    Args:
        dtype: of the storage.
    """
    return not dtype.is_floating_point or torch.finfo(dtype).max <= _WIDE_RANGE


@frozen
class ScaledCode:
    """Stores a state in a floating dtype, with one power of two a tensor where the range asks for one.

    bf16 has fp32's range and needs none. fp16 and fp8 keep `value / scale` with one scale a tensor, the smallest power
    of two for which `max|value| / scale` does not exceed the dtype's largest number. Powers of two make decoding exact:
    encoding what was decoded gives the same values. What is not finite has no part in the scale, and decodes to what is
    not finite: the other elements keep their values.

    Args:
        dtype: of the storage.
        positive: round positive values that the dtype would take for 0 up to its smallest one, as second moments need,
            which are divided by.

    Example:
        >>> code = ScaledCode(torch.float16)
        >>> code.decode(*code.encode(torch.tensor([3.0, -(2.0**20)]))).tolist()
        [3.0, -1048576.0]
    """

    name: ClassVar[str] = SCALED
    dtype: torch.dtype
    positive: bool = False

    def encode(
        self, value: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stored elements and their scale; None where there is none.

        Args:
            value: fp32.
            entropy: rounding is always to nearest.
        """
        if not needs_scale(self.dtype):
            return value.to(self.dtype), None
        largest = value.abs().nan_to_num_(0.0, 0.0).max() if value.numel() else value.new_zeros(())
        mantissa, exponent = torch.frexp(largest / torch.finfo(self.dtype).max)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_SMALLEST_EXPONENT)
        scale = torch.where(
            largest > 0, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest)
        )
        scaled = value / scale
        if self.dtype in _WITHOUT_INFINITY:  # torch stores its largest number instead
            scaled = torch.where(scaled.isinf(), torch.nan, scaled)
        if self.positive:
            smallest = torch.finfo(self.dtype).smallest_normal * torch.finfo(self.dtype).eps
            scaled = torch.where((value > 0) & (scaled < smallest), smallest, scaled)
        return scaled.to(self.dtype), scale

    def decode(self, stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """Return the values in fp32.

        Args:
            stored: in the storage dtype.
            scale: one element; what the stored values are to be multiplied by, None for 1.
        """
        value = stored.float()
        return value if scale is None else value.mul_(scale)

    def stored(self, key: str) -> StoredTensor:
        """Return the layout.

        Args:
            key: of the state.
        """
        if not needs_scale(self.dtype):
            return StoredTensor(self.dtype)
        return StoredTensor(self.dtype, SCALED, scale_key(key), is_positive=self.positive)

    def saved(self, scale: Any, start: int, stop: int) -> Mapping[str, Any]:
        """Return the scale: it holds for all elements.

        Args:
            scale: one element.
            start: position of the first element.
            stop: position behind the last one.
        """
        return {"scale": scale}

    def common_scale(self, slices: Sequence[StoredSlice], like: torch.Tensor) -> torch.Tensor | None:
        """Return the one scale of all slices; None where they have several, or another code or dtype.

        Args:
            slices: what was saved.
            like: a tensor of the piece's shape and device.
        """
        found = {
            float(part.values["scale"]) if (part.code, part.elements.dtype) == (SCALED, self.dtype) else None
            for part in slices
        }
        scale = found.pop() if len(found) == 1 else None
        return None if scale is None else torch.tensor(scale, dtype=torch.float32, device=like.device)
