"""Fields of settings classes and their validators; each raises an error that names value and range."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import Attribute, Converter, field, frozen
from attrs.validators import and_

from megaopt_core.config._dtypes import dtype_name, parse_dtype, shown
from megaopt_core.errors import ConfigurationError, UnsupportedSettingError

__all__ = [
    "AT_LEAST_ZERO",
    "FINITE",
    "FP32_SCALE",
    "FRACTION",
    "FUNCTION_OR_NONE",
    "NAME",
    "TEXT",
    "WHOLE_COUNT",
    "Rule",
    "between",
    "boolean",
    "default_only",
    "dtype_setting",
    "limit_setting",
    "not_negative",
    "one_of",
    "positive",
    "setting",
    "switch",
    "whole_number",
]

type Validator = Callable[[Any, Attribute[Any], Any], None]


@frozen
class Rule:
    """Which values are allowed; as the validator of a field it refuses all others.

    Args:
        allows: whether a value is allowed.
        words: what is allowed.
        then: the rule for values that this one allows; None: there is no other.

    Example:
        >>> between(0.0, 1.0).allows(1.0), between(0.0, 1.0).words
        (False, 'a number in [0.0, 1.0)')
    """

    allows: Callable[[Any], bool]
    words: str
    then: Rule | None = None

    def refusal(self, value: Any) -> str | None:
        """Return what is allowed where a value is not; None where it is.

        Args:
            value: what was given.

        Example:
            >>> positive().refusal(0.0), positive().refusal(1e50), positive().refusal(0.5)
            ('a number above 0', 'above 0 and finite in fp32', None)
        """
        if not self.allows(value):
            return self.words
        return None if self.then is None else self.then.refusal(value)

    def __call__(self, _: Any, attribute: Attribute[Any], value: Any) -> None:
        """Raise for a value that is not allowed.

        Args:
            attribute: the field.
            value: what was given.

        Raises:
            ConfigurationError: it is not allowed; the message names field, value and what is.
        """
        allowed = self.refusal(value)
        if allowed is not None:
            raise ConfigurationError.of(attribute.name, value, f"must be {allowed}", shown=shown(value))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return whether a value is a number that a float holds: whole ones may be larger."""
    return _is_number(value) and -sys.float_info.max <= value <= sys.float_info.max


def _is_scale(value: Any) -> bool:
    """Return whether a loss can be multiplied by a number in fp32, and gradients by 1 over it."""
    if not 0 < value <= torch.finfo(torch.float32).max:
        return False
    rounded = torch.tensor(value, dtype=torch.float64, device="cpu").float()
    return all(0.0 < float(each) < math.inf for each in (rounded, rounded.double().reciprocal().float()))


TEXT = Rule(lambda value: isinstance(value, str), "a str")
NAME = Rule(lambda value: isinstance(value, str) and bool(value), "a name")
FUNCTION_OR_NONE = Rule(lambda value: value is None or callable(value), "callable or None")
FINITE = Rule(_is_finite, "a finite number")
FRACTION = Rule(lambda value: _is_finite(value) and 0.0 <= value <= 1.0, "a number from 0 to 1")
FP32_SCALE = Rule(_is_scale, "above 0 and finite in fp32, as 1 over it")
AT_LEAST_ZERO = Rule(lambda value: _is_finite(value) and value >= 0, "a number of at least 0")
_FP32 = torch.finfo(torch.float32)
_SMALLEST_FP32 = _FP32.tiny * _FP32.eps
_ABOVE_ZERO = Rule(
    lambda value: _is_finite(value) and value > 0,
    "a number above 0",
    Rule(lambda value: _SMALLEST_FP32 <= value <= _FP32.max, "above 0 and finite in fp32"),
)
_FACTOR = Rule(
    AT_LEAST_ZERO.allows, AT_LEAST_ZERO.words, Rule(lambda value: value <= _FP32.max, "finite in fp32")
)
_LIMIT = Rule(
    lambda value: _is_number(value) and value > 0 and (value == math.inf or _is_finite(value)),
    "a number above 0, or inf",
)
_INT64 = Rule(lambda value: value <= torch.iinfo(torch.int64).max, "an integer of 64 bits")
_BOOL = Rule(lambda value: isinstance(value, bool), "True or False")

WHOLE_COUNT = and_(
    _ABOVE_ZERO,
    Rule(lambda value: value >= 1, "a number of at least 1"),
    Rule(lambda value: isinstance(value, int) or value.is_integer(), "a whole number"),
)
"""Refuses what counts nothing; a count may be written as a float."""


def between(low: float, high: float) -> Rule:
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
    return Rule(lambda value: _is_finite(value) and low <= value < high, f"a number in [{low}, {high})")


def positive() -> Rule:
    """Return a validator for numbers above 0, in fp32 too: what is computed with would be 0 or infinite otherwise."""
    return _ABOVE_ZERO


def not_negative() -> Rule:
    """Return a validator for numbers of at least 0, finite in fp32."""
    return _FACTOR


def whole_number(low: int = 0, high: int | None = None) -> Rule:
    """Return a validator for integers of at least `low`.

    Args:
        low: the smallest allowed value.
        high: the largest allowed value; None: the largest of 64 bits.

    Example:
        >>> whole_number(1, 100).words
        'an integer from 1 to 100'
    """
    if high is not None:
        return Rule(lambda value: _is_int(value) and low <= value <= high, f"an integer from {low} to {high}")
    return Rule(lambda value: _is_int(value) and value >= low, f"an integer of at least {low}", _INT64)


def boolean() -> Rule:
    """Return a validator for True and False, and nothing that only counts as one of them.

    Example:
        >>> from attrs import field, frozen
        >>> @frozen
        ... class Settings:
        ...     nesterov: bool = field(default=False, validator=boolean())
        >>> Settings(nesterov=True)
        Settings(nesterov=True)
    """
    return _BOOL


def one_of(choices: Sequence[Any]) -> Rule:
    """Return a validator for a fixed set of values.

    Args:
        choices: what is allowed.
    """
    # 1 == True, but who writes 1 for a switch may mean a number.
    return Rule(
        lambda value: any(
            isinstance(value, bool) is isinstance(choice, bool) and value == choice for choice in choices
        ),
        f"one of {', '.join(map(repr, choices))}",
    )


def setting(default: Any, check: Validator, help: str, converter: Any = None) -> Any:  # noqa: A002 - as in argparse
    """Return an attrs field with help text.

    Args:
        default: its default.
        check: its validator.
        help: what it does.
        converter: makes its value of what is given; None: nothing does.
    """
    return field(default=default, validator=check, converter=converter, metadata={"help": help})


def switch(help: str, *, default: bool = False) -> Any:  # noqa: A002 - as above
    """Return a field that is True or False.

    Args:
        help: what it does.
        default: its default.
    """
    return setting(default, _BOOL, help)


def limit_setting(help: str) -> Any:  # noqa: A002 - as above
    """Return a field for a number above 0, infinity by default, which JSON writes as the text `inf`.

    Args:
        help: what it does.
    """
    return setting(math.inf, _LIMIT, help, Converter(_parse_infinity))


def _parse_infinity(value: Any) -> Any:
    return math.inf if value == "inf" else value


def dtype_setting(allowed: Sequence[torch.dtype], help: str) -> Any:  # noqa: A002 - as above
    """Return a field for a dtype, float32 by default, which may be given as a string.

    Args:
        allowed: the dtypes that it takes.
        help: what it does.
    """
    rule = Rule(lambda value: value in allowed, f"one of {', '.join(map(dtype_name, allowed))}")
    return setting(torch.float32, rule, help, Converter(parse_dtype))


def default_only(*, default: Any, why: str, help: str) -> Any:  # noqa: A002 - as above
    """Return a field that exists for configurations of other trainers and takes nothing but its default.

    Args:
        default: the one value.
        why: why there is no other.
        help: what it would do.
    """

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if isinstance(value, bool) is not isinstance(default, bool) or value != default:
            raise UnsupportedSettingError.of(
                attribute.name, value, f"{why}; only the default {default!r} is accepted"
            )

    return setting(default, check, f"{help} Only the default is accepted: {why}.")
