"""How parameters are kept between steps when they are stepped in fp32 but stored in less."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define, field

__all__ = [
    "LOW_PRECISION",
    "ParamStorage",
    "Remainder",
    "SeparateMain",
    "join_remainder",
    "split_remainder",
    "take_changed",
]

LOW_PRECISION = (torch.float16, torch.bfloat16)
"""Dtypes of model parameters that are too coarse to be stepped themselves."""


@torch.no_grad()
def take_changed(main: torch.Tensor, model: torch.Tensor) -> None:
    """Copy the model's values into main values that do not round to them; the others keep all of their bits.

    Args:
        main: main values, changed in place.
        model: the model's values, of any dtype.

    Example:
        >>> main, model = torch.tensor([1.001, 2.0]), torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
        >>> take_changed(main, model)
        >>> [round(value, 4) for value in main.tolist()]
        [1.001, 3.0]
    """
    model = model.to(main.device)
    rounded = main.to(model.dtype)
    stays = (rounded == model) | (rounded.isnan() & model.isnan())
    main.copy_(torch.where(stays, main, model.to(main.dtype)))


@define
class ParamStorage:
    """Keeps one parameter's value in full precision; here the model's parameter is the only copy.

    Args:
        param: the model's parameter.
    """

    param: torch.Tensor

    def load(self) -> torch.Tensor:
        """Return the value, in fp32 where it is kept in less; writing into it may or may not write the storage."""
        return self.param.detach().float() if self.param.dtype in LOW_PRECISION else self.param.detach()

    def store(self, value: torch.Tensor) -> None:
        """Keep a new value and round it into the parameter.

        Args:
            value: what was stepped.
        """
        if value.data_ptr() != self.param.data_ptr():
            self.param.copy_(value)

    has_main: ClassVar[bool] = False
    """Whether the storage says more than the model's parameter."""

    def take_model(self) -> None:
        """Take the model's present value over, where what is kept does not round to it."""

    def watched(self) -> list[torch.Tensor]:
        """Return the tensors in which a change shows."""
        return [self.param]

    def set_main(self, value: torch.Tensor) -> None:
        """Take over the value that :meth:`load` returned; ignored where the model's checkpoint holds the only copy.

        Args:
            value: of any floating dtype.
        """


@define
class SeparateMain(ParamStorage):
    """A main copy in a dtype of its own.

    Args:
        param: the model's parameter.
        dtype: of the main copy.
    """

    has_main: ClassVar[bool] = True
    dtype: torch.dtype
    main: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.main = self.param.detach().to(self.dtype, copy=True)

    def load(self) -> torch.Tensor:
        """Return the main copy in fp32."""
        return self.main if self.dtype == torch.float32 else self.main.float()

    def store(self, value: torch.Tensor) -> None:
        """Keep the value in the main copy's dtype, and in the model's.

        Args:
            value: what was stepped.
        """
        if value is not self.main:
            self.main.copy_(value)
        self.param.copy_(self.main)  # not of `value`: rounded once, it may lie elsewhere than rounded twice

    def take_model(self) -> None:
        """Copy the model's values into main values that do not round to them."""
        take_changed(self.main, self.param)

    def watched(self) -> list[torch.Tensor]:
        """Return the main copy."""
        return [self.main]

    def set_main(self, value: torch.Tensor) -> None:
        """Copy a value into the main copy.

        Args:
            value: of any floating dtype.
        """
        self.main.copy_(value)


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
