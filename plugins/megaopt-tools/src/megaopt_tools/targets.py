"""Options that are meant for one optimizer or for all: `adam=3e-3` and `3e-3`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megaopt_core.config import parse_assignments
from megaopt_tools.errors import CommandError

__all__ = ["learning_rates", "settings_by_target"]


def learning_rates(given: Iterable[str], names: Sequence[str]) -> dict[str, float]:
    """Return the learning rate of every optimizer that `--lr` names.

    Args:
        given: `"adam=3e-3"`, or `"3e-3"` for all that are not named; the last one holds.
        names: the optimizers that there are.

    Raises:
        CommandError: an optimizer is not there, or what is given is no number.

    Example:
        >>> learning_rates(["1e-3", "muon=0.02"], ["adam", "muon"])
        {'adam': 0.001, 'muon': 0.02}
    """
    return _by_target("--lr", given, "=", names, _number)


def settings_by_target(given: Iterable[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the settings of every optimizer.

    Args:
        given: `"muon:muon_momentum=0.9"`, or `"weight_decay=0.1"` for all.
        names: the optimizers that there are.

    Raises:
        CommandError: an optimizer is not there.
        ConfigurationError: a setting is not written `FIELD=VALUE`.

    Example:
        >>> settings_by_target(["clip_grad=0.5", "muon:muon_nesterov=true"], ["adam", "muon"])
        {'adam': {'clip_grad': 0.5}, 'muon': {'clip_grad': 0.5, 'muon_nesterov': True}}
    """
    parts = [(*_split("--set", text, ":", names), text) for text in given]
    return {
        name: parse_assignments(rest for target, rest, _ in parts if target in (None, name)) for name in names
    }


def _by_target[T](
    option: str, given: Iterable[str], separator: str, names: Sequence[str], read: Callable[[str, str], T]
) -> dict[str, T]:
    for_all: dict[str, T] = {}
    for_one: dict[str, T] = {}
    for text in given:
        target, rest = _split(option, text, separator, names)
        value = read(f"{option} {text}", rest)
        if target is None:
            for_all = dict.fromkeys(names, value)
        else:
            for_one[target] = value
    return {**for_all, **for_one}


def _split(option: str, text: str, separator: str, names: Sequence[str]) -> tuple[str | None, str]:
    match = re.match(rf"([^:=]+){separator}", text)
    if match is None:
        return None, text
    target = match[1].strip()
    if target not in names:
        raise CommandError(f"{option} {text}: {target!r} is not among the optimizers {', '.join(names)}")
    return target, text[match.end() :]


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"{option}: {text!r} is not a number") from None
