"""`megaopt describe`: every setting with type, default and meaning."""

from __future__ import annotations

import textwrap
from argparse import Namespace
from typing import Any

import torch

from megaopt_core.config import dtype_name
from megaopt_core.errors import ConfigurationError
from megaopt_core.reporting import wrapped
from megaopt_tools.cli.output import print_json, print_table, terminal_width
from megaopt_tools.inspection.about import about

__all__ = ["run"]

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
    told = about(args.name)
    settings = told["settings"] = _with_words(told["settings"], args.words, told["name"])
    if args.json:
        print_json(told)
        return 0
    print(f"{told['name']}: {told['description']}\n")
    facts = [(what, told[what]) for what in _FACTS if what in told]
    for what, value in () if args.words else facts:
        print(f"  {what + ':':<13}{value}")
    if facts and not args.words:
        print()
    if args.name is None and not args.words:
        _print_short(settings)
        return 0
    if not settings:
        print("It has no settings of its own.")
        return 0
    _print_settings(settings)
    if told.get("example") and not args.words:
        print(f"\nExample:\n\n  {told['example']}")
    return 0


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
    rows = [(row["name"], _shown(row["default"]), row["help"]) for row in settings]
    longest = max(len(name) for name, _, _ in rows)
    usual = max(len(default) for _, default, _ in rows if len(default) <= _USUAL_DEFAULT)
    for name, default, meaning in rows:
        print(_cut(f"{name:<{longest}}  {default:<{usual}}  {meaning}", width))
    print(
        "\n`megaopt describe SETTING` explains one setting; `megaopt describe OPTIMIZER` lists those of an "
        "optimizer."
    )


def _cut(line: str, width: int) -> str:
    """Return a line that ends between words where it is too long."""
    if len(line) <= width:
        return line
    return line[: line.rfind(" ", 0, width - 3)].rstrip() + " ..."


def _shown(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return repr(value)
