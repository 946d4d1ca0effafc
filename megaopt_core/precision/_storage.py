"""How parameters are kept between steps when they are stepped in fp32 but stored in less."""

from __future__ import annotations

from typing import ClassVar

import torch
from attrs import define, field

from megaopt_core.precision._stored import StoredTensor

__all__ = ["LOW_PRECISION", "ParamStorage", "SeparateMain", "take_changed"]

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

    def stored_main(self) -> StoredTensor | None:
        """Return the layout of what is kept beside the parameter; None: nothing is."""
        return None

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

    def stored_main(self) -> StoredTensor | None:
        """Return that the main copy holds values."""
        return StoredTensor(self.dtype)

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
