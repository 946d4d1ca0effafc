"""Where the commands print, and how."""

from __future__ import annotations

import sys

from rich.console import Console

from megaopt_core.cli import terminal_width
from megaopt_tools.text import Text

__all__ = ["console_for_output", "print_text", "say"]

_PIPE_WIDTH = 120


def console_for_output() -> Console:
    """Return the console for standard output, coloured on a terminal alone, where `NO_COLOR` does not forbid it.

    In a file or pipe its tables are wide enough to stay whole.
    """
    console = Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        return console
    return Console(file=sys.stdout, highlight=False, width=terminal_width() or _PIPE_WIDTH)


def say(console: Console, text: str) -> None:
    """Print text as it is, above a progress bar if there is one.

    Args:
        console: where to.
        text: lines that are not wrapped, nor searched for markup.
    """
    console.print(text, markup=False, soft_wrap=True)


def print_text(console: Console, text: Text) -> None:
    """Print source, size, split and SHA-256 of a text.

    Args:
        console: where to.
        text: the text.
    """
    held_out = len(text.data) - text.train_bytes
    sizes = f"{len(text.data):,} bytes, {text.train_bytes:,} to train on, {held_out:,} held out"
    say(console, f"text    {text.source}: {sizes}\nsha256  {text.sha256}\n")
