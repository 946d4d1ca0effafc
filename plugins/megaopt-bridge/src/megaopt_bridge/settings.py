"""The settings class of a bridged optimizer, made from its constructor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import attrs
import torch

from megaopt_bridge.arguments import Argument
from megaopt_bridge.checks import check_of, texts_of
from megaopt_core.config import parse_dtype

__all__ = ["settings_class"]


def settings_class(
    cls: type[torch.optim.Optimizer], arguments: Mapping[str, Argument], always: Mapping[str, Any]
) -> type | None:
    """Return an attrs class with a field for every setting; None: there is none.

    Values are checked by type and sign, and then by the class itself: an optimizer of one small parameter is made with
    them, and what its constructor refuses is refused.

    Args:
        cls: the optimizer class.
        arguments: its constructor's arguments.
        always: arguments that are always given, which are no settings.

    Raises:
        ValueError: by the class that is made; the core adds the setting's full name.
    """
    fields = {
        name: attrs.field(
            default=_without_lists(argument.default),
            converter=_converter(argument),
            validator=check_of(name, _without_lists(argument.default), argument.annotation),
            type=argument.annotation or _type_of(argument.default),
            metadata={"help": argument.help},
        )
        for name, argument in arguments.items()
        if argument.is_setting and name not in always
    }
    if not fields:
        return None
    needed = {"lr": 1e-3} if "lr" in arguments else {}
    body = {
        "__doc__": f"Settings of {cls.__module__}.{cls.__qualname__}.",
        "__module__": __name__,
        "__attrs_post_init__": lambda self: _require_constructible(cls, self, {**needed, **always}),
    }
    return attrs.make_class(f"{cls.__name__}Settings", fields, frozen=True, kw_only=True, class_body=body)


def _require_constructible(cls: type[torch.optim.Optimizer], settings: Any, given: Mapping[str, Any]) -> None:
    changed = {
        field.name: value
        for field in attrs.fields(type(settings))
        if (value := getattr(settings, field.name)) is not field.default
    }
    if not changed:
        return
    param = torch.nn.Parameter(torch.zeros(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cls([param], **{**given, **changed})
        except Exception as error:
            raise ValueError(f"{cls.__name__} refuses it: {str(error) or type(error).__name__}") from error


def _converter(argument: Argument) -> Callable[[Any], Any]:
    """Files have lists where Python has tuples, names where it has dtypes, and texts where it has members."""
    texts = texts_of(argument.default, argument.annotation)
    if texts is not None:
        return partial(_member, texts)
    return parse_dtype if isinstance(argument.default, torch.dtype) else _without_lists


def _member(texts: type[Enum], value: Any) -> Any:
    try:
        return texts(value)
    except ValueError:
        return value  # the validator lists the members


def _without_lists(value: Any) -> Any:
    return tuple(map(_without_lists, value)) if isinstance(value, list) else value


def _type_of(default: Any) -> Any:
    return None if default is None else type(default)
