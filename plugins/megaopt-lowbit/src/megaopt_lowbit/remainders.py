"""The bits that a bf16 parameter lacks, kept beside it: together they are its fp32 main value."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define, field

from megaopt_core.precision import REMAINDER, ParamStorage, StoredTensor

__all__ = ["Remainder", "join_remainder", "split_remainder"]


@define
class Remainder(ParamStorage):
    """The bf16 parameter and the 16 bits that it lacks: together they are the main value.

    Args:
        param: the model's parameter, bf16.
    """

    has_main: ClassVar[bool] = True
    remainder: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.remainder = torch.zeros_like(self.param, dtype=torch.int16)

    def load(self) -> torch.Tensor:
        """Return the joined fp32 value, where the remainder is: it may be on the CPU for a time."""
        return join_remainder(self.param.detach().to(self.remainder.device), self.remainder)

    def store(self, value: torch.Tensor) -> None:
        """Split the value into parameter and remainder.

        Args:
            value: what was stepped.
        """
        model, remainder = split_remainder(value)
        self.param.copy_(model)
        self.remainder.copy_(remainder)

    def stored_main(self) -> StoredTensor | None:
        """Return the layout of the remainder."""
        return StoredTensor(torch.int16, REMAINDER)

    def take_model(self) -> None:
        """Forget remainders that cannot belong to the model's value.

        A remainder is less than half a step of bf16, so nearly every value may have any: zeros and what is not finite
        may not.
        """
        _, remainder = split_remainder(self.load())
        self.remainder.copy_(remainder)

    def watched(self) -> list[torch.Tensor]:
        """Return parameter and remainder."""
        return [self.param, self.remainder]

    def set_main(self, value: torch.Tensor) -> None:
        """Split a value into parameter and remainder.

        Args:
            value: of any floating dtype.
        """
        self.store(value.float().to(self.param.device))


def split_remainder(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 values into bf16 values and the bits that those lack.

    With `b` the 32 bits of a value read as an integer, the remainder is the low half of `b` as a signed 16-bit integer
    `r`, and the bf16 value has the bits `(b - r) / 2**16`: `main` rounded to nearest, ties away from zero. Every NaN is
    taken for the one NaN that bf16 and fp32 both write as 0x7FC0...: rounding others could make numbers of them.

    Args:
        main: fp32, any shape.

    Returns:
        `(bf16 values, int16 remainders)`, both of `main`'s shape.

    Example:
        >>> model, remainder = split_remainder(torch.tensor([1.0 + 2.0**-20]))
        >>> bool(join_remainder(model, remainder) == 1.0 + 2.0**-20)
        True
    """
    bits = torch.where(main.isnan(), torch.nan, main).contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = torch.bitwise_right_shift(bits - remainder.to(torch.int32), 16).to(torch.int16)
    return high.view(torch.bfloat16), remainder


def join_remainder(model: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values that :func:`split_remainder` split, bit for bit; a NaN may be another one.

    A bf16 value that somebody wrote since may have a remainder that no split makes with it: zero one below 0, infinity
    one above. Both would make NaN of it, which a split never does of a number; the bf16 value is returned then.

    Args:
        model: bf16 values.
        remainder: int16, of the same shape.

    Example:
        >>> model, remainder = split_remainder(torch.tensor([0.999, 3.0]))
        >>> join_remainder(torch.zeros_like(model), remainder).tolist()
        [0.0, 0.0]
    """
    high = model.contiguous().view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    joined = (high + remainder).view(torch.float32)
    return torch.where(joined == joined, joined, high.view(torch.float32), out=joined)  # noqa: PLR0124 - false of NaN
