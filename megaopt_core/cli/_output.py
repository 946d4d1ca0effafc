"""How commands print: tables that fit the terminal, and JSON."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from megaopt_core.reporting._text_table import format_table

__all__ = ["print_json", "print_table", "terminal_width"]


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
    print(format_table(header, rows, width=terminal_width(), right=right))


def _for_json(value: Any) -> str:
    return str(value).removeprefix("torch.")
