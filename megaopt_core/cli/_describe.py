"""`megaopt describe`: every setting with type, default and meaning."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from typing import Any

import attrs
import torch

from megaopt_core.cli._describing.other_names import other_name, setting_row
from megaopt_core.cli._optimizers import settings_of_optimizer
from megaopt_core.cli._output import print_json, print_table, terminal_width
from megaopt_core.config._dtypes import dtype_name
from megaopt_core.config._fields import CORE_FIELD_NAMES, core_field_info
from megaopt_core.errors import ConfigurationError
from megaopt_core.registry._registry import get_registry
from megaopt_core.registry._setting_owners import type_name
from megaopt_core.reporting._text_table import wrapped

__all__ = ["run"]

_OF_EVERY_OPTIMIZER = ("lr", "weight_decay", "clip_grad")
"""Settings of the core that whoever sets up an optimizer asks for first."""

_FACTS = ("plugin", "serves", "class", "granularity", "acts on", "fp16")

_PIPE_WIDTH = 120

_INDENT = "    "

_GAPS = 6
"""Spaces between the columns of the table of settings."""

_MEANING = 40
"""The least room for what a setting does in a row of its table."""

_USUAL_DEFAULT = 12
"""Longer defaults push their line alone."""


def run(args: Namespace) -> int:
    """Print what a name is, with its settings, or without one a short list of all of the core's.

    Args:
        args: `name`, `words`, `json`.

    Returns:
        0.

    Raises:
        ConfigurationError: no setting has all the words.
    """
    about = _about(args.name)
    about["settings"] = _with_words(about["settings"], args.words, about["name"])
    if args.json:
        print_json(about)
        return 0
    print(f"{about['name']}: {about['description']}\n")
    facts = [(what, about[what]) for what in _FACTS if what in about]
    for what, value in () if args.words else facts:
        print(f"  {what + ':':<13}{value}")
    if facts and not args.words:
        print()
    if args.name is None and not args.words:
        _print_short(about["settings"])
        return 0
    if not about["settings"]:
        print("It has no settings of its own.")
        return 0
    _print_settings(about["settings"])
    if about.get("example") and not args.words:
        print(f"\nExample:\n\n  {about['example']}")
    return 0


def _about(name: str | None) -> dict[str, Any]:
    if name is None or name in CORE_FIELD_NAMES:
        return _core(name)
    registry = get_registry()
    if name in registry.schedules() and name not in registry.optimizers():
        return _schedule(name)
    return _optimizer(name) if registry.has_optimizer(name) else other_name(name)


def _schedule(name: str) -> dict[str, Any]:
    """Tell about a style of learning rate or weight decay, with the settings of its own."""
    registry = get_registry()
    style = registry.schedule(name)
    serves = [
        what
        for what, function in (("lr_decay_style", style.learning_rate), ("wd_incr_style", style.weight_decay))
        if function is not None
    ]
    fields = () if style.settings is None else attrs.fields(style.settings)
    return {
        "name": name,
        "description": style.description or "its plugin does not describe it",
        "plugin": registry.owner("schedule", name).source,
        "serves": ", ".join(serves),
        "settings": [
            {
                "name": field.name,
                "type": type_name(field.type),
                "default": getattr(style.settings(), field.name),  # type: ignore[misc] # there are fields
                "help": str(field.metadata.get("help", "")),
            }
            for field in fields
        ],
    }


def _with_words(settings: list[dict[str, Any]], words: list[str], name: str) -> list[dict[str, Any]]:
    """Return the settings whose name or meaning has every word."""
    found = [
        row
        for row in settings
        if all(word.lower() in f"{row['name']} {row['help']}".lower() for word in words)
    ]
    if words and not found:
        raise ConfigurationError(
            f"{name} has no setting with {' and '.join(map(repr, words))} in its name or meaning; it has "
            f"{', '.join(row['name'] for row in settings)}",
            setting="words",
            value=words,
        )
    return found


def _print_settings(settings: list[dict[str, Any]]) -> None:
    """Print a table, or where it has no room each setting with its meaning below it."""
    rows = [[row["name"], row["type"], _shown(row["default"]), row["help"]] for row in settings]
    width = terminal_width()
    beside = sum(max(len(row[column]) for row in rows) for column in range(3)) + _GAPS
    if width is None or beside + _MEANING <= width:
        print_table(["setting", "type", "default", "what it does"], rows)
        return
    for number, (name, kind, default, meaning) in enumerate(rows):
        print(("\n" if number else "") + "\n".join(_hanging(f"{name}: {kind}, default {default}", width)))
        print(textwrap.indent("\n".join(wrapped(meaning, width - len(_INDENT))), _INDENT))


def _hanging(text: str, width: int) -> list[str]:
    first, *rest = wrapped(text, width - len(_INDENT))
    return [first, *(_INDENT + line for line in rest)]


def _print_short(settings: list[dict[str, Any]]) -> None:
    """Print a line for every setting of the core."""
    width = terminal_width() or _PIPE_WIDTH
    name = max(len(row["name"]) for row in settings)
    shown = [_shown(row["default"]) for row in settings]
    default = max(len(value) for value in shown if len(value) <= _USUAL_DEFAULT)
    for row in settings:
        line = f"{row['name']:<{name}}  {_shown(row['default']):<{default}}  {row['help']}"
        print(_cut(line, width))
    print("\n`megaopt describe SETTING` explains one; `megaopt describe OPTIMIZER` those of an optimizer.")


def _cut(line: str, width: int) -> str:
    """Return a line that ends between words where it is too long."""
    if len(line) <= width:
        return line
    return line[: line.rfind(" ", 0, width - 3)].rstrip() + " ..."


def _core(name: str | None) -> dict[str, Any]:
    rows = [
        {"name": info.name, "type": info.type, "default": info.default, "help": info.help}
        for info in core_field_info()
        if name is None or info.name == name
    ]
    return {
        "name": "OptimizerConfig",
        "description": "what every run can set, whichever plugins are installed",
        "settings": rows,
        "example": "OptimizerConfig(lr=3e-4, weight_decay=0.1, bf16=True)",
    }


def _optimizer(name: str) -> dict[str, Any]:
    registry = get_registry()
    entry = registry.optimizer(name)
    cls = entry.optimizer_cls
    own = [setting_row(full) for full in settings_of_optimizer(name)]
    return {
        "name": name,
        "description": entry.description or "its plugin does not describe it",
        "plugin": registry.owner("optimizer", name).source,
        "class": cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}",
        "granularity": entry.granularity.value,
        "fp16": "supported" if entry.supports_fp16 else "not supported",
        "settings": own + [row for row in _core(None)["settings"] if row["name"] in _OF_EVERY_OPTIMIZER],
        "example": entry.example or f'build_optimizer(model, "{name}", lr=1e-3)',
    }


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(value)
