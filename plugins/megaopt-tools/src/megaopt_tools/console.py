"""Where the commands print, and how."""

from __future__ import annotations

import sys

from rich.console import Console

from megaopt_tools.cli.output import terminal_width
from megaopt_tools.text import Text

__all__ = ["console_for_output", "print_text", "say"]

_PIPE_WIDTH = 120


class _Console(Console):
    """A console that tells of a closed pipe as `print` does, so that `megaopt` ends as for its other commands."""

    def on_broken_pipe(self) -> None:
        """Raise the `BrokenPipeError` that this is called for."""
        raise  # noqa: PLE0704 - rich calls this where it has caught the error


def console_for_output() -> Console:
    """Return the console for standard output, coloured on a terminal alone, where `NO_COLOR` does not forbid it.

    In a file or pipe its tables are wide enough to stay whole.
    """
    console = _Console(file=sys.stdout, highlight=False)
    if console.is_terminal:
        return console
    return _Console(file=sys.stdout, highlight=False, width=terminal_width() or _PIPE_WIDTH)


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
