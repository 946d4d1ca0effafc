"""The kinds of field that the core's configuration is made of, and dtypes written as strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import Attribute, Converter, field

from megaopt_core.errors import ConfigurationError, UnsupportedSettingError

__all__ = [
    "FLOAT_DTYPES",
    "STATE_DTYPES",
    "at_least_one",
    "default_only",
    "dtype_name",
    "dtype_setting",
    "is_function",
    "is_name",
    "is_text",
    "limit_setting",
    "parse_dtype",
    "setting",
    "switch",
]

type _Check = Callable[[Any, Attribute[Any], Any], None]

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
"""Dtypes in which a precision-aware optimizer can be asked to keep its tensors."""

FLOAT_DTYPES = (torch.float64, *STATE_DTYPES)
"""Dtypes in which weights can be initialised."""

_SHORT_NAMES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
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
    by_name = {dtype_name(dtype): dtype for dtype in FLOAT_DTYPES}
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


def setting(default: Any, check: _Check, help: str) -> Any:  # noqa: A002 - as in argparse
    """Return an attrs field with help text.

    Args:
        default: its default.
        check: its validator.
        help: what it does.
    """
    return field(default=default, validator=check, metadata={"help": help})


def switch(help: str, *, default: bool = False) -> Any:  # noqa: A002 - as above
    """Return a field that is True or False.

    Args:
        help: what it does.
        default: its default.
    """
    return setting(default, _is_bool, help)


def dtype_setting(allowed: Sequence[torch.dtype], help: str) -> Any:  # noqa: A002 - as above
    """Return a field for a dtype, float32 by default, which may be given as a string.

    Args:
        allowed: the dtypes that it takes.
        help: what it does.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value not in allowed:
            raise _refuse(attribute, value, f"one of {', '.join(map(dtype_name, allowed))}")

    return field(
        default=torch.float32, converter=Converter(parse_dtype), validator=check, metadata={"help": help}
    )


def default_only(*, default: Any, why: str, help: str) -> Any:  # noqa: A002 - as above
    """Return a field that exists for configurations of other trainers and takes nothing but its default.

    Args:
        default: the one value.
        why: why there is no other.
        help: what it would do.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) is not isinstance(default, bool) or value != default:
            raise UnsupportedSettingError(
                f"{attribute.name}={value!r}: {why}; only the default {default!r} is accepted",
                setting=attribute.name,
                value=value,
            )

    return setting(default, check, f"{help} Only the default is accepted: {why}.")


def is_text(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse what is no str.

    Args:
        attribute: the field.
        value: what was given.
    """
    if not isinstance(value, str):
        raise _refuse(attribute, value, "a str")


def is_name(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse what is no str, and the empty one.

    Args:
        attribute: the field.
        value: what was given.
    """
    if not isinstance(value, str) or not value:
        raise _refuse(attribute, value, "a name")


def is_function(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse what cannot be called.

    Args:
        attribute: the field.
        value: what was given.
    """
    if not callable(value):
        raise _refuse(attribute, value, "callable or None")


def limit_setting(help: str) -> Any:  # noqa: A002 - as above
    """Return a field for a number above 0, infinity by default, which JSON writes as the text `inf`.

    Args:
        help: what it does.
    """
    return field(
        default=float("inf"),
        converter=Converter(_parse_infinity),
        validator=_is_above_zero,
        metadata={"help": help},
    )


def _parse_infinity(value: Any) -> Any:
    return float("inf") if value == "inf" else value


def _is_above_zero(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise _refuse(attribute, value, "a number above 0, or inf")


def at_least_one(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse numbers below 1.

    Args:
        attribute: the field.
        value: a number.
    """
    if value < 1:
        raise _refuse(attribute, value, "a number of at least 1")


def _is_bool(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute, value, "True or False")


def _refuse(attribute: Attribute[Any], value: Any, allowed: str) -> ConfigurationError:
    shown = repr(dtype_name(value)) if isinstance(value, torch.dtype) else repr(value)
    return ConfigurationError(
        f"{attribute.name}={shown}: must be {allowed}", setting=attribute.name, value=value
    )
