"""State tensors in fewer bits: bf16 as it is, fp16 and fp8 with one power of two a tensor."""

from __future__ import annotations

import torch

__all__ = ["decode_state", "encode_state"]

_WIDE_RANGE = 1.0e30
_SMALLEST_EXPONENT = -126
"""Below it a scale is no normal fp32 number, and dividing by it is not exact."""


def decode_state(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a state tensor in fp32.

    Args:
        stored: in its storage dtype.
        scale: one element; what the stored values are to be multiplied by, None for 1.
    """
    value = stored.float()
    return value if scale is None else value.mul_(scale)


def encode_state(
    value: torch.Tensor, dtype: torch.dtype, *, keep_positive: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a state tensor in a storage dtype, with the scale that a narrow range needs.

    bf16 has fp32's range and needs none. fp16 and fp8 keep `value / scale` with one scale a tensor, the smallest power
    of two for which `max|value| / scale` does not exceed the dtype's largest number. Powers of two make decoding exact:
    encoding what was decoded gives the same values.

    Args:
        value: fp32.
        dtype: of the storage.
        keep_positive: round positive values that the dtype would take for 0 up to its smallest one, as second moments
            need, which are divided by.

    Returns:
        `(stored, scale)`; `scale` is None where there is none.

    Example:
        >>> stored, scale = encode_state(torch.tensor([3.0, -(2.0**20)]), torch.float16)
        >>> decode_state(stored, scale).tolist()
        [3.0, -1048576.0]
    """
    if dtype == torch.float32:
        return value, None
    if torch.finfo(dtype).max > _WIDE_RANGE:
        return value.to(dtype), None
    largest = value.abs().max() if value.numel() else value.new_zeros(())
    mantissa, exponent = torch.frexp(largest / torch.finfo(dtype).max)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(min=_SMALLEST_EXPONENT)
    usable = torch.isfinite(largest) & (largest > 0)
    scale = torch.where(usable, torch.ldexp(torch.ones_like(largest), exponent), torch.ones_like(largest))
    scaled = value / scale
    if keep_positive:
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        scaled = torch.where((value > 0) & (scaled < smallest), smallest, scaled)
    return scaled.to(dtype), scale
