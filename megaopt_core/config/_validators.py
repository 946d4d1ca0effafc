"""Fields of settings classes and their validators; each raises an error that names value and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import Attribute, Converter, field

from megaopt_core.config._dtypes import dtype_name, parse_dtype
from megaopt_core.errors import ConfigurationError, UnsupportedSettingError

__all__ = [
    "SCALE_RANGE",
    "at_least_one",
    "between",
    "boolean",
    "default_only",
    "dtype_setting",
    "fp32_scale",
    "fraction",
    "is_function",
    "is_name",
    "is_scale",
    "is_text",
    "no_fraction",
    "not_negative",
    "one_of",
    "positive",
    "setting",
    "switch",
    "whole_number",
]

SCALE_RANGE = "above 0 and finite in fp32, as 1 over it"

type Validator = Callable[[Any, Attribute[Any], Any], None]


def _refuse(attribute: Attribute[Any], value: Any, allowed: str) -> ConfigurationError:
    shown = repr(dtype_name(value)) if isinstance(value, torch.dtype) else repr(value)
    return ConfigurationError(
        f"{attribute.name}={shown}: must be {allowed}", setting=attribute.name, value=value
    )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def between(low: float, high: float) -> Validator:
    """Return a validator for numbers in `[low, high)`.

    Args:
        low: the smallest allowed value.
        high: the first value that is not allowed.

    Example:
        >>> from attrs import field, frozen
        >>> @frozen
        ... class Settings:
        ...     beta: float = field(default=0.9, validator=between(0.0, 1.0))
        >>> Settings(beta=1.0)
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: beta=1.0: must be a number in [0.0, 1.0)
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (_number(value) and low <= value < high):
            raise _refuse(attribute, value, f"a number in [{low}, {high})")

    return check


def fraction(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse what is no number from 0 to 1.

    Args:
        attribute: the field.
        value: what was given.
    """
    if not (_number(value) and 0.0 <= value <= 1.0):
        raise _refuse(attribute, value, "a number from 0 to 1")


def positive() -> Validator:
    """Return a validator for numbers above 0."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (_number(value) and value > 0):
            raise _refuse(attribute, value, "a number above 0")

    return check


def not_negative() -> Validator:
    """Return a validator for numbers of at least 0."""

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not (_number(value) and value >= 0):
            raise _refuse(attribute, value, "a number of at least 0")

    return check


def whole_number(low: int = 0) -> Validator:
    """Return a validator for integers of at least `low`.

    Args:
        low: the smallest allowed value.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise _refuse(attribute, value, f"an integer of at least {low}")

    return check


def boolean() -> Validator:
    """Return a validator for True and False, and nothing that only counts as one of them.

    Example:
        >>> from attrs import field, frozen
        >>> @frozen
        ... class Settings:
        ...     nesterov: bool = field(default=False, validator=boolean())
        >>> Settings(nesterov=True)
        Settings(nesterov=True)
    """
    return _is_bool


def one_of(choices: Sequence[Any]) -> Validator:
    """Return a validator for a fixed set of values.

    Args:
        choices: what is allowed.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        # 1 == True, but who writes 1 for a switch may mean a number.
        if not any(
            isinstance(value, bool) is isinstance(choice, bool) and value == choice for choice in choices
        ):
            raise _refuse(attribute, value, f"one of {', '.join(map(repr, choices))}")

    return check


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


def no_fraction(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse numbers between two whole ones.

    Args:
        attribute: the field.
        value: a number.
    """
    if not (isinstance(value, int) or value.is_integer()):
        raise _refuse(attribute, value, "a whole number")


def is_scale(value: float) -> bool:
    """Return whether a loss can be multiplied by a number in fp32, and gradients by 1 over it.

    Args:
        value: the number.
    """
    if not 0 < value <= torch.finfo(torch.float32).max:
        return False
    rounded = torch.tensor(value, dtype=torch.float64).float()
    return all(0.0 < float(each) < math.inf for each in (rounded, rounded.double().reciprocal().float()))


def fp32_scale(_: Any, attribute: Attribute[Any], value: Any) -> None:
    """Refuse what is no number above 0, or one that fp32 does not hold.

    Args:
        attribute: the field.
        value: what was given.
    """
    positive()(_, attribute, value)
    if not is_scale(value):
        raise _refuse(attribute, value, SCALE_RANGE)


def _is_bool(_: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute, value, "True or False")


def setting(default: Any, check: Validator, help: str) -> Any:  # noqa: A002 - as in argparse
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
