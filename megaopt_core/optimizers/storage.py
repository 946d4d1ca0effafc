"""How parameters and states are kept between steps when they are stepped in fp32 but stored in less."""

from __future__ import annotations

from typing import Protocol

import torch
from attrs import define, field

from megaopt_core.optimizers.remainders import join_remainder, split_remainder

__all__ = ["InPlace", "ParamStorage", "Remainder", "SeparateMain", "decode_state", "encode_state"]


class ParamStorage(Protocol):
    """Keeps one parameter's fp32 value somehow."""

    def load(self) -> torch.Tensor:
        """Return the fp32 value; writing into it may or may not write the storage."""

    def store(self, value: torch.Tensor) -> None:
        """Keep a new fp32 value and round it into the model's parameter.

        Args:
            value: what was stepped.
        """

    def take_model(self) -> None:
        """Start again from the model's present value."""

    def watched(self) -> list[torch.Tensor]:
        """Return the tensors in which a change shows."""

    def extra(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint needs besides the model's parameter."""

    def set_extra(self, key: str, value: torch.Tensor) -> None:
        """Take over a value that :meth:`extra` returned.

        Args:
            key: its key.
            value: its value.
        """


@define
class InPlace:
    """The model's parameter is the only copy."""

    param: torch.Tensor

    def load(self) -> torch.Tensor:
        """Return the parameter itself, or its fp32 value where it is narrower."""
        return self.param.detach() if self.param.dtype == torch.float32 else self.param.detach().float()

    def store(self, value: torch.Tensor) -> None:
        """Round the value into the parameter, unless it is the parameter.

        Args:
            value: what was stepped.
        """
        if value.data_ptr() != self.param.data_ptr():
            self.param.copy_(value)

    def take_model(self) -> None:
        """Nothing to do."""

    def watched(self) -> list[torch.Tensor]:
        """Return the parameter."""
        return [self.param]

    def extra(self) -> dict[str, torch.Tensor]:
        """Return nothing."""
        return {}

    def set_extra(self, key: str, value: torch.Tensor) -> None:
        """Ignore a main value: the model's parameter holds it.

        Args:
            key: not used.
            value: not used.
        """


@define
class SeparateMain:
    """A main copy in a dtype of its own.

    Args:
        param: the model's parameter.
        dtype: of the main copy.
    """

    param: torch.Tensor
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
        self.param.copy_(value)

    def take_model(self) -> None:
        """Copy the model's parameter into the main copy."""
        self.main.copy_(self.param)

    def watched(self) -> list[torch.Tensor]:
        """Return the main copy."""
        return [self.main]

    def extra(self) -> dict[str, torch.Tensor]:
        """Return the main copy."""
        return {"main_param": self.main}

    def set_extra(self, key: str, value: torch.Tensor) -> None:
        """Copy a value into the main copy.

        Args:
            key: `"main_param"`.
            value: of any floating dtype.
        """
        self.main.copy_(value)


@define
class Remainder:
    """The bf16 parameter and the 16 bits that it lacks.

    Args:
        param: the model's parameter, bf16.
    """

    param: torch.Tensor
    remainder: torch.Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.remainder = torch.zeros_like(self.param, dtype=torch.int16)

    def load(self) -> torch.Tensor:
        """Return the joined fp32 value."""
        return join_remainder(self.param.detach(), self.remainder)

    def store(self, value: torch.Tensor) -> None:
        """Split the value into parameter and remainder.

        Args:
            value: what was stepped.
        """
        model, remainder = split_remainder(value)
        self.param.copy_(model)
        self.remainder.copy_(remainder)

    def take_model(self) -> None:
        """Forget the remainder."""
        self.remainder.zero_()

    def watched(self) -> list[torch.Tensor]:
        """Return parameter and remainder."""
        return [self.param, self.remainder]

    def extra(self) -> dict[str, torch.Tensor]:
        """Return the whole fp32 value, so that any policy can load it."""
        return {"main_param": self.load()}

    def set_extra(self, key: str, value: torch.Tensor) -> None:
        """Split a value into parameter and remainder.

        Args:
            key: `"main_param"`.
            value: of any floating dtype.
        """
        self.store(value.float().to(self.param.device))


def _is_scaled(dtype: torch.dtype) -> bool:
    return torch.finfo(dtype).max < 1.0e30


def decode_state(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Return a state tensor in fp32.

    Args:
        stored: in its storage dtype.
        scale: one element; what the stored values are to be multiplied by, None for 1.
    """
    value = stored.float()
    return value if scale is None else value.mul_(scale)


def encode_state(value: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a state tensor in a storage dtype, with the scale that a narrow range needs.

    bf16 has fp32's range and needs none. fp16 and fp8 keep `value / scale` with `scale = max|value| / max(dtype)`, one
    scale a tensor, so that second moments do not underflow.

    Args:
        value: fp32.
        dtype: of the storage.

    Returns:
        `(stored, scale)`.
    """
    if not _is_scaled(dtype):
        return value.to(dtype), None
    largest = value.abs().max() if value.numel() else value.new_zeros(())
    scale = torch.where(largest > 0, largest / torch.finfo(dtype).max, torch.ones_like(largest))
    return (value / scale).to(dtype), scale
