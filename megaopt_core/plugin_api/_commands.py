"""What a plugin adds commands to."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any, Protocol

__all__ = ["Commands"]


class Commands(Protocol):
    """The commands of `megaopt`; what `argparse.ArgumentParser.add_subparsers` returns is one."""

    def add_parser(self, name: str, *args: Any, **kwargs: Any) -> ArgumentParser:
        """Add a command, and return the parser of its arguments.

        Args:
            name: what users write after `megaopt`.
            *args: none.
            **kwargs: `help`, `description` and whatever else `ArgumentParser` takes. An `epilog` that begins with
                `examples:` is shown as it is, line by line.
        """

    @property
    def choices(self) -> Mapping[str, ArgumentParser]:
        """Every command that there is, to look at."""
