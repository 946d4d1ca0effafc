"""Reading configuration files, with the line of every key, which `tomllib` does not tell."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from megaopt_core.errors import ConfigFileError

__all__ = ["ConfigFile", "RawOverride", "read_config_file"]

_STRING_OR_COMMENT = re.compile(
    r'"""(?:\\.|[^\\])*?"""|' + r"'''.*?'''|" + r'"(?:\\.|[^"\\\n])*"|' + r"'[^'\n]*'|#[^\n]*", re.DOTALL
)
_TABLE = re.compile(r"\s*(?P<open>\[\[?)\s*(?P<name>[^\]]+?)\s*\]")
_KEY = re.compile(r"""\s*(?P<quote>["']?)(?P<key>[\w-]+)(?P=quote)\s*[.=]""")


@frozen
class RawOverride:
    """One `[[overrides]]` table, as it stands in the file.

    Args:
        path: the file.
        values: its keys and values.
        line: the line of its header, counted from 1.
        lines: the line of each key.
    """

    path: str
    values: Mapping[str, Any]
    line: int
    lines: Mapping[str, int]

    def fault(self, words: str, key: str | None = None) -> ConfigFileError:
        """Return the error for what the table says.

        Args:
            words: what is wrong.
            key: the key that says it; None: the table does as a whole.
        """
        line = self.lines.get(key or "", self.line)
        return ConfigFileError(words, path=self.path, line=line, setting=key)


@frozen
class ConfigFile:
    """A configuration file: settings at the top, then `[[overrides]]` tables.

    Args:
        path: the file.
        settings: keys and values outside `[[overrides]]`.
        lines: the line of each of these keys, counted from 1.
        overrides: the tables, in their order.
        standard_overrides: whether the standard overrides apply; by default they do where there are no tables.
    """

    path: str
    settings: Mapping[str, Any]
    lines: Mapping[str, int]
    overrides: tuple[RawOverride, ...]
    standard_overrides: bool


def read_config_file(path: str | os.PathLike[str]) -> ConfigFile:
    """Read a TOML file without deciding what its keys mean.

    Args:
        path: the file.

    Raises:
        ConfigFileError: it cannot be read, is no TOML, or its overrides are no list of tables.
    """
    shown = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # bytes that are no text, a path that no file can have
        raise ConfigFileError(f"cannot be read: {error}", path=shown) from error
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(shown, error) from error
    except RecursionError as error:
        raise ConfigFileError("nests lists or tables too deeply", path=shown) from error
    lines, tables = _locate(text)
    overrides = settings.pop("overrides", [])
    if not (isinstance(overrides, list) and all(isinstance(table, dict) for table in overrides)):
        raise ConfigFileError(
            "overrides is a list of tables: begin each with [[overrides]]",
            path=shown,
            line=lines.get("overrides"),
        )
    if len(tables) != len(overrides):  # written inline: they share the line of their key
        line = lines.get("overrides", 1)
        tables = [(line, dict.fromkeys(table, line)) for table in overrides]
    raw = tuple(
        RawOverride(shown, values, line, keys) for values, (line, keys) in zip(overrides, tables, strict=True)
    )
    standard = settings.pop("standard_overrides", not overrides)
    if not isinstance(standard, bool):
        raise ConfigFileError(
            f"standard_overrides={standard!r}: must be true or false",
            path=shown,
            line=lines.get("standard_overrides"),
        )
    return ConfigFile(shown, settings, {key: lines[key] for key in settings if key in lines}, raw, standard)


def _not_toml(path: str, error: tomllib.TOMLDecodeError) -> ConfigFileError:
    message = str(error)
    found = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", message)
    reason = message[: found.start()] if found else message
    line = int(found[1]) if found and found[1] else None
    return ConfigFileError(f"is not valid TOML: {reason}", path=path, line=line)


def _locate(text: str) -> tuple[dict[str, int], list[tuple[int, dict[str, int]]]]:
    """Return the line of every top-level key, and of every `[[overrides]]` table with its keys."""
    lines: dict[str, int] = {}
    tables: list[tuple[int, dict[str, int]]] = []
    current: dict[str, int] | None = lines
    for number, line in enumerate(_code_lines(text), start=1):
        if table := _TABLE.match(line):
            name = table["name"].strip("\"'")
            current = None
            if table["open"] == "[[" and name == "overrides":
                current = {}
                tables.append((number, current))
            lines.setdefault(name.partition(".")[0], number)
        elif current is not None and (key := _KEY.match(line)):
            current.setdefault(key["key"], number)
    return lines, tables


def _code_lines(text: str) -> Iterator[str]:
    """Yield the lines without comments and without what stands inside multi-line strings."""

    def blank(found: re.Match[str]) -> str:
        token = found[0]
        if token.startswith("#"):
            return ""
        return '""' + "\n" * token.count("\n") if token[:3] in ('"""', "'''") else token

    yield from _STRING_OR_COMMENT.sub(blank, text).split("\n")
