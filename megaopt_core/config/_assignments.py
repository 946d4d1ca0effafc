"""Settings as command lines have them: `NAME=VALUE`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megaopt_core.errors import ConfigurationError

__all__ = ["parse_assignments"]

_WORDS = {"True": True, "False": False, "None": None}


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return settings from `NAME=VALUE`; a value is read as JSON or as True, False, None, else it is a string.

    Args:
        assignments: the arguments.

    Raises:
        ConfigurationError: one has no `=`.

    Example:
        >>> parse_assignments(["clip_grad=0.5", "bf16=true", "sharding=replicated"])
        {'clip_grad': 0.5, 'bf16': True, 'sharding': 'replicated'}
    """
    settings = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not (equals and name.strip()):
            raise ConfigurationError(
                f"--set {assignment}: write it as NAME=VALUE", setting=name, value=assignment
            )
        settings[name.strip()] = _value(text.strip())
    return settings


def _value(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):  # what nests too deep is no value of a setting either
        return text
