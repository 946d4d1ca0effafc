"""How commands print: tables that fit the terminal, and JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

__all__ = ["print_json", "print_table", "terminal_width", "wrapped_table"]

_GAP = 2
_NARROWEST = 10


def terminal_width() -> int | None:
    """Return the width to print in; None, for no limit, where the output goes into a file or pipe."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


def print_json(value: Any) -> None:
    """Print a value as JSON; dtypes as their names, anything else that JSON lacks as its `str`.

    Args:
        value: dicts, lists and scalars.
    """
    print(json.dumps(value, indent=2, default=_for_json))


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
) -> None:
    """Print a table that is as wide as the terminal at most.

    Args:
        header: the columns' names.
        rows: the cells; each is shown with `str`.
        right: names of columns that are aligned to the right.
    """
    print(wrapped_table(header, rows, width=terminal_width(), right=right))


def wrapped_table(
    header: Sequence[str], rows: Sequence[Sequence[object]], *, width: int | None, right: Sequence[str] = ()
) -> str:
    """Return rows in aligned columns; cells of the widest columns are wrapped where the table is too wide.

    Args:
        header: the columns' names.
        rows: the cells; each is shown with `str`.
        width: longest line; None: no limit. No column becomes narrower than ten letters.
        right: names of columns that are aligned to the right.

    Example:
        >>> print(wrapped_table(["name", "why"], [["bias", "a vector is stepped elementwise"]], width=24))
        name  why
        ----  ------------------
        bias  a vector is
              stepped
              elementwise
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [list(header), *cells]) for column in range(len(header))]
    if width is not None:
        available = width - _GAP * (len(widths) - 1)
        words = [
            max(len(word) for row in [header, *cells] for word in row[column].split() or [""])
            for column in range(len(header))
        ]
        widths = _narrowed(
            widths, words, available
        )  # whole words first; names are broken only where that is too wide
        least = [min(size, max(len(name), _NARROWEST)) for size, name in zip(widths, header, strict=True)]
        widths = _narrowed(widths, least, available)

    def line(row: Sequence[str]) -> str:
        aligned = [
            cell.rjust(size) if name in right else cell.ljust(size)
            for cell, size, name in zip(row, widths, header, strict=True)
        ]
        return (" " * _GAP).join(aligned).rstrip()

    lines = [line(header), line(["-" * size for size in widths])]
    for row in cells:
        wrapped = [
            textwrap.wrap(cell, size, break_on_hyphens=False) or [""]
            for cell, size in zip(row, widths, strict=True)
        ]
        height = max(len(cell) for cell in wrapped)
        padded = [cell + [""] * (height - len(cell)) for cell in wrapped]
        lines += [line([cell[index] for cell in padded]) for index in range(height)]
    return "\n".join(lines)


def _wrap(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]


def _narrowed(widths: list[int], least: list[int], available: int) -> list[int]:
    """Take from the widest column again and again until the sum fits, or nothing can be taken."""
    widths = list(widths)
    while sum(widths) > available:
        column = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        if widths[column] <= least[column]:
            break
        widths[column] -= 1
    return widths


def _for_json(value: Any) -> str:
    return str(value).removeprefix("torch.")
