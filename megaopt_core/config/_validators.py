"""Validators for the fields of settings classes; each raises an error that names value and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from attrs import Attribute

from megaopt_core.errors import ConfigurationError

__all__ = ["between", "not_negative", "one_of", "positive", "whole_number"]

type Validator = Callable[[Any, Attribute[Any], Any], None]


def _refuse(attribute: Attribute[Any], value: Any, allowed: str) -> ConfigurationError:
    return ConfigurationError(
        f"{attribute.name}={value!r}: must be {allowed}", setting=attribute.name, value=value
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
