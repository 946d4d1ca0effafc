"""Dtypes that a configuration may name, and their names."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core.errors import shown_value

__all__ = ["FLOAT_DTYPES", "STATE_DTYPES", "dtype_name", "parse_dtype", "shown"]

_FLOAT_STATES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

STATE_DTYPES = (*_FLOAT_STATES, torch.uint8)
"""Dtypes in which a precision-aware optimizer can be asked to keep its tensors; uint8 stands for codes of 8 bits."""

FLOAT_DTYPES = (torch.float64, *_FLOAT_STATES)
"""Dtypes in which weights can be initialised."""

_SHORT_NAMES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "8bit": torch.uint8,
}


def parse_dtype(value: Any) -> Any:
    """Return the dtype that a string names; anything else is returned as it is.

    Args:
        value: `"bfloat16"`, `"torch.bfloat16"`, `"bf16"`, or a dtype.

    Example:
        >>> parse_dtype("bf16")
        torch.bfloat16
    """
    if not isinstance(value, str):
        return value
    name = value.removeprefix("torch.")
    by_name = {dtype_name(dtype): dtype for dtype in (*FLOAT_DTYPES, torch.uint8)}
    return (_SHORT_NAMES | by_name).get(name, value)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as a string that :func:`parse_dtype` reads.

    Args:
        dtype: the dtype.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    """Return a value of a setting as a person would write it: dtypes by their names.

    Args:
        value: the value.

    Example:
        >>> shown(torch.bfloat16), shown(0.1)
        ("'bfloat16'", '0.1')
    """
    return shown_value(dtype_name(value) if isinstance(value, torch.dtype) else value)
