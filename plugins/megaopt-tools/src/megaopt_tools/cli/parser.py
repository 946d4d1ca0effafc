"""The parser of `megaopt` and of its commands: wrong arguments are answered with the command's usage and a guess."""

from __future__ import annotations

import argparse
import difflib
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["CommandParser", "examples", "meant"]

_EXAMPLES = "examples:\n"

_HELP_POSITION = 27
"""Column from which help is written; commands are shorter."""


def examples(*lines: str) -> str:
    """Return the `epilog` of a command's parser that shows command lines at the end of `--help`, as they are.

    Args:
        *lines: the command lines.

    Example:
        >>> print(examples("megaopt plugins", "megaopt plugins --load"))
        examples:
          megaopt plugins
          megaopt plugins --load
    """
    return _EXAMPLES + "\n".join(f"  {line}" for line in lines)


def meant(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean NAME?"`, empty when nothing is close.

    Args:
        name: what was given.
        known: what there is.

    Example:
        >>> meant("--optimzer", ["--optimizer", "--json"])
        '; did you mean --optimizer?'
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _Formatter(argparse.HelpFormatter):
    """Wraps all text but the examples, whose lines are to be copied; a command and what it does share a line."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": _HELP_POSITION, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(_EXAMPLES):
            return textwrap.indent(text, indent)
        return super()._fill_text(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that guesses what a wrong option or command was meant to be.

    The class of a parser is that of its commands' parsers too, plugins' among them.

    Args:
        *args: as for `ArgumentParser`.
        **options: as for `ArgumentParser`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", _Formatter)
        super().__init__(*args, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, after a look for options that nobody knows: what follows one would be misread.

        Args:
            args: the arguments.
            namespace: what is filled.
        """
        if args is not None:
            self._refuse_unknown_options(args)
        return super().parse_known_args(args, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and leave nothing over; an error is the command's own.

        Args:
            args: the arguments.
            namespace: what is filled.
        """
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            chosen = self.commands.get(getattr(parsed, "command", None) or "", self)
            chosen.error(f"unrecognized arguments: {' '.join(rest)}")
        return parsed

    @property
    def commands(self) -> dict[str, argparse.ArgumentParser]:
        """The parsers of this one's commands, by name."""
        found = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: parser for action in found for name, parser in action.choices.items()}

    def refuse_unknown_command(self, command: str) -> None:
        """Exit with an error for a command that there is not.

        Args:
            command: what was given.
        """
        if command not in self.commands:
            self.error(
                f"unknown command {command!r}{meant(command, self.commands) or '.'} `{self.prog} --help` lists all"
            )

    def _refuse_unknown_options(self, args: Sequence[str]) -> None:
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return
        known = self._option_string_actions
        for arg in args:
            name = arg.partition("=")[0]
            if arg == "--" or (arg in self.commands and not arg.startswith("-")):
                return
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                self.error(f"unknown option {name}{meant(name, known)}")
