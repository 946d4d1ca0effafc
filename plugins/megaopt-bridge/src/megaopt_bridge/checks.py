"""Which values a constructor's argument may have, read from its default and annotation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from attrs import Attribute

from megaopt_core.errors import ConfigurationError

__all__ = ["Check", "check_of", "is_setting", "texts_of"]

# In quotes: whoever reads the alias when the program runs cannot index the class.
type Check = Callable[[Any, "Attribute[Any]", Any], None]
type _Test = Callable[[Any], bool]

_DECAY_RATES = re.compile(r"(.*_)?betas?\d*|momentum")
_PLAIN = (bool, int, float, str, torch.dtype)


def is_setting(default: Any, annotation: Any) -> bool:
    """Return whether an argument can be set in a configuration: numbers, switches, text, dtypes, tuples and functions.

    Args:
        default: its default.
        annotation: its annotation, resolved; None where it has none.

    Example:
        >>> is_setting((0.9, 0.999), None), is_setting(None, tuple[float, float] | None)
        (True, True)
        >>> is_setting(None, dict | None), is_setting(None, list[dict] | None), is_setting(object(), None)
        (False, False, False)
    """
    if default is None:
        kinds = [kind for kind in _members(annotation) if kind is not type(None)]
        return not kinds or any(map(_is_plain, kinds)) or texts_of(default, annotation) is not None
    if isinstance(default, (tuple, list)):
        return all(item is None or isinstance(item, _PLAIN) for item in default)
    return isinstance(default, _PLAIN) or callable(default)


def texts_of(default: Any, annotation: Any) -> type[Enum] | None:
    """Return the enumeration of texts that an argument takes a member of; None: it takes none.

    Args:
        default: its default.
        annotation: its annotation, resolved; None where it has none.

    Example:
        >>> from enum import StrEnum
        >>> Mode = StrEnum("Mode", ["FAST", "EXACT"])
        >>> texts_of(Mode.FAST, None) is Mode, texts_of(None, Mode | None) is Mode, texts_of("fast", None)
        (True, True, None)
    """
    kinds = [type(default)] if default is not None else _members(annotation)
    found = (
        kind for kind in kinds if isinstance(kind, type) and issubclass(kind, str) and issubclass(kind, Enum)
    )
    return next(found, None)


def check_of(name: str, default: Any, annotation: Any) -> Check:
    """Return a validator for an argument.

    Numbers are finite, have the default's sign, and decay rates (`beta1`, `betas`, `momentum`) whose default is below 1
    stay below 1. The default itself is always allowed. The class may be stricter.

    Args:
        name: the argument's name.
        default: its default.
        annotation: its annotation, resolved; None where it has none.

    Example:
        >>> from attrs import field, make_class
        >>> check = check_of("beta", 0.9, float)
        >>> make_class("Settings", {"beta": field(default=0.9, validator=check)})(1.5)
        Traceback (most recent call last):
        megaopt_core.errors.ConfigurationError: beta=1.5: must be a number in [0, 1)
    """
    test, allowed = _test(name, default, annotation)
    accepts_none = default is None or type(None) in _members(annotation)
    if accepts_none:
        allowed += ", or None"

    def check(_: Any, attribute: Attribute[Any], value: Any) -> None:
        if value is default or (value is None and accepts_none) or test(value):
            return
        raise ConfigurationError.of(attribute.name, value, f"must be {allowed}")

    return check


def _test(name: str, default: Any, annotation: Any) -> tuple[_Test, str]:
    kinds, texts = _members(annotation), texts_of(default, annotation)
    if texts is not None:
        return lambda value: isinstance(value, texts), _listed(member.value for member in texts)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices:
        return lambda value: value in choices, _listed(choices)
    if isinstance(default, bool) or (default is None and bool in kinds):
        return lambda value: isinstance(value, bool), "True or False"
    if isinstance(default, int) and not _may_be(float, kinds):
        return _is_int, "an integer"
    if isinstance(default, (int, float)):
        return _number_test(name, [default])
    if isinstance(default, str):
        return lambda value: isinstance(value, str), "a str"
    if isinstance(default, torch.dtype):
        return lambda value: isinstance(value, torch.dtype), "a torch.dtype"
    if isinstance(default, (tuple, list)):
        return _tuple_test(name, default)
    if default is not None:
        return callable, "callable"
    return _test_without_default(name, kinds)


def _test_without_default(name: str, kinds: Sequence[Any]) -> tuple[_Test, str]:
    found = list(_tests_of_kinds(name, kinds))
    if found:
        return lambda value: any(test(value) for test, _ in found), ", or ".join(words for _, words in found)
    return lambda value: isinstance(value, _PLAIN) and value == value, "a number, a str or a switch"  # noqa: PLR0124 - NaN


def _tests_of_kinds(name: str, kinds: Sequence[Any]) -> Iterator[tuple[_Test, str]]:
    """Yield a test for what each kind of an annotation allows."""
    if float in kinds:
        yield _number_test(name, [0.0])
    elif int in kinds:
        yield _is_int, "an integer"
    else:
        allowed = tuple(kind for kind in kinds if isinstance(kind, type) and kind in _PLAIN)
        if allowed:
            yield (
                lambda value: isinstance(value, allowed),
                " or ".join(kind.__name__ for kind in allowed),
            )
    yield from (_annotated_tuple_test(name, kind) for kind in kinds if _is_tuple(kind))


def _annotated_tuple_test(name: str, kind: Any) -> tuple[_Test, str]:
    """Test a tuple, or a list, which is given as a tuple, by what is said to be in it."""
    parts = get_args(kind)
    inside = tuple(part for part in parts if part is not Ellipsis)
    size = len(inside) if inside and inside == parts and get_origin(kind) is tuple else None
    of_size = "a tuple" if size is None else f"a tuple of {size}"

    def fits(value: Any) -> bool:
        return isinstance(value, tuple) and size in {None, len(value)}

    if inside and all(part in {int, float} for part in inside):
        number, allowed = (_is_int, "an integer") if float not in inside else _number_test(name, [0.0])
        return lambda value: fits(value) and all(map(number, value)), f"{of_size} of which each is {allowed}"
    if inside and all(part in _PLAIN for part in inside):
        words = " or ".join(dict.fromkeys(part.__name__ for part in inside))
        return (
            lambda value: fits(value) and all(isinstance(item, inside) for item in value),
            f"{of_size} of which each is a {words}",
        )
    return fits, of_size


def _tuple_test(name: str, default: Sequence[Any]) -> tuple[_Test, str]:
    numbers = [item for item in default if isinstance(item, (int, float)) and not isinstance(item, bool)]
    if len(numbers) < len([item for item in default if item is not None]):
        return lambda value: isinstance(value, tuple), "a tuple"
    inside, allowed = _number_test(name, numbers)
    return (
        lambda value: isinstance(value, tuple) and all(item in default or inside(item) for item in value),
        f"a tuple of which each is {allowed}",
    )


def _number_test(name: str, defaults: Sequence[float]) -> tuple[_Test, str]:
    if _DECAY_RATES.fullmatch(name) and defaults and all(0 <= default < 1 for default in defaults):
        return lambda value: _is_number(value) and 0 <= value < 1, "a number in [0, 1)"
    if all(default >= 0 for default in defaults):
        return lambda value: _is_number(value) and value >= 0, "a number of at least 0"
    if all(default <= 0 for default in defaults):
        return lambda value: _is_number(value) and value <= 0, "a number of at most 0"
    return _is_number, "a finite number"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


def _may_be(kind: type, kinds: Sequence[Any]) -> bool:
    return kind in kinds


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the one annotation; nothing where there is none."""
    if annotation is None:
        return ()
    if get_origin(annotation) in {Union, UnionType}:
        return tuple(member for part in get_args(annotation) for member in _members(part) or (type(None),))
    return (annotation,)


def _is_plain(kind: Any) -> bool:
    return kind in _PLAIN or get_origin(kind) is Literal or _is_tuple(kind)


def _is_tuple(kind: Any) -> bool:
    origin = get_origin(kind) or kind
    return origin is tuple or (origin in {list, Sequence} and all(part in _PLAIN for part in get_args(kind)))


def _listed(values: Iterable[Any]) -> str:
    return f"one of {', '.join(map(repr, values))}"
