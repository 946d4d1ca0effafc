"""The arguments of a class's constructor: which are the core's, which are settings, which cannot be given."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from attrs import frozen

from megaopt_bridge.checks import is_setting

__all__ = ["CORE_FIELDS", "Argument", "arguments_of"]

CORE_FIELDS: Mapping[str, str] = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "decoupled_weight_decay": "decoupled_weight_decay",
    "weight_decouple": "decoupled_weight_decay",
    "decouple": "decoupled_weight_decay",
    "decoupled_decay": "decoupled_weight_decay",
}
"""Constructor argument to the core's field that it is given."""

_NOT_GIVEN = frozenset({"differentiable"})
"""Nobody differentiates through a step that a pipeline of norm and clipping makes."""


@frozen
class Argument:
    """One named argument of a constructor.

    Args:
        name: its name.
        default: its default; `inspect.Parameter.empty`: it has to be given.
        annotation: what may be given, resolved; None where nothing is said.
        help: what the class's docstring says of it.
    """

    name: str
    default: Any
    annotation: Any
    help: str

    @property
    def core_field(self) -> str | None:
        """The core's field that it is given; None: it is no such argument."""
        return CORE_FIELDS.get(self.name)

    @property
    def is_required(self) -> bool:
        """True when it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def is_setting(self) -> bool:
        """True when a configuration can set it."""
        known = self.core_field is not None or self.is_required or self.name in _NOT_GIVEN
        return not known and is_setting(self.default, self.annotation)


def arguments_of(cls: type[torch.optim.Optimizer]) -> dict[str, Argument]:
    """Return the named arguments of a constructor but the parameters.

    Args:
        cls: an optimizer class.

    Example:
        >>> found = arguments_of(torch.optim.NAdam)
        >>> found["betas"].default, found["betas"].is_setting, found["lr"].core_field
        ((0.9, 0.999), True, 'lr')
    """
    parameters = list(inspect.signature(cls).parameters.values())[1:]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    annotations, texts = _annotations(cls), _texts(cls)
    return {
        parameter.name: Argument(
            parameter.name,
            _plain(parameter.default),
            annotations.get(parameter.name),
            texts.get(parameter.name) or f"Argument `{parameter.name}` of {cls.__name__}.",
        )
        for parameter in parameters
        if parameter.kind in named
    }


def _plain(default: Any) -> Any:
    """A member of an enumeration of numbers is a number, which files can hold."""
    return int(default) if isinstance(default, IntEnum) else default


def _annotations(cls: type[torch.optim.Optimizer]) -> dict[str, Any]:
    try:
        found = typing.get_type_hints(cls.__init__)
    except Exception:  # noqa: BLE001 - an annotation may be any expression, also one that fails
        return {}
    return {name: _resolved(annotation) for name, annotation in found.items()}


def _resolved(annotation: Any) -> Any:
    value = getattr(annotation, "__value__", annotation)  # `type X = ...`
    return None if value is Any else value


def _texts(cls: type[torch.optim.Optimizer]) -> dict[str, str]:
    """Return what the class's docstring, or its constructor's, says of each argument: `name (type): text`."""
    found: dict[str, str] = {}
    for text in (cls.__init__.__doc__, cls.__doc__):
        lines = inspect.cleandoc(text or "").splitlines()
        for index, line in enumerate(lines):
            match = re.match(r"(\s*)(?::param )?(\w+)\s*(?:\(.*?\))?\s*:\s+(\S.*)", line)
            if match is None:
                continue
            indent, name, words = len(match[1]), match[2], [match[3]]
            for more in lines[index + 1 :]:
                if not more.strip() or len(more) - len(more.lstrip()) <= indent:
                    break
                words.append(more.strip())
            found[name] = _first_sentence(" ".join(words))
    return found


def _first_sentence(text: str) -> str:
    # A sentence ends where white space and a capital letter follow: `i.e.` and `1e-8.` do not end one.
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z])", text, maxsplit=1)[0]
    return re.sub(r"\s*\(default: [^)]*\)", "", sentence).strip()
