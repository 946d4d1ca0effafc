"""How commands print: tables that fit the terminal, and JSON."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from megaopt_core.reporting import format_table

__all__ = ["any_output", "print_beside", "print_json", "print_table", "silence_output", "terminal_width"]


def terminal_width() -> int | None:
    """Return the width to print in; None, for no limit, where the output goes into a file or pipe."""
    if "COLUMNS" in os.environ or sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    return None


@contextmanager
def any_output() -> Iterator[None]:
    """Let commands print where there is no output, or one that cannot show every letter: these are escaped."""
    as_before = sys.stdout, sys.stderr
    errors = [(stream, stream.errors) for stream in as_before if isinstance(stream, io.TextIOWrapper)]
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout, sys.stderr = (nowhere if stream is None else stream for stream in as_before)
        for stream, handler in errors:
            stream.reconfigure(errors="backslashreplace" if handler == "strict" else handler)
        try:
            yield
        finally:
            for stream, handler in errors:
                stream.reconfigure(errors=handler)
            sys.stdout, sys.stderr = as_before


def print_beside() -> AbstractContextManager[Any]:
    """Send what others' code prints, such as plugins', to the error stream: a program may read the output as JSON."""
    return redirect_stdout(sys.stderr)


def silence_output() -> None:
    """Send the rest of the output nowhere: who read it is gone, or where it went is full."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, AttributeError):  # it is no file, so that nothing is written at the end of the process
        return


def print_json(value: Any) -> None:
    """Print a value as JSON; dtypes as their names, anything else that JSON lacks as its `str`.

    Args:
        value: dicts, lists and scalars.
    """
    print(json.dumps(value, indent=2, default=lambda each: str(each).removeprefix("torch.")))


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
