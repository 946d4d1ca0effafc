"""Commands of plugins: collected one plugin at a time, run under its plugin's name."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from attrs import define, field

from megaopt_core.errors import DuplicateNameError, MegaoptError, PluginError, PluginHookError
from megaopt_core.plugin_api import Commands
from megaopt_core.registry import PluginInfo, PluginRegistry, contested, words_of
from megaopt_tools.cli.parser import CommandParser

__all__ = ["PluginCommands"]


@define
class _OwnCommands:
    """What one plugin gets for `commands`: it can add its own, and change nobody else's."""

    _commands: Commands
    _owner: PluginInfo
    _all: PluginCommands

    def add_parser(self, name: str, **options: Any) -> ArgumentParser:
        """Add a command; one whose name is taken gets a parser that is never used.

        Args:
            name: its name.
            **options: as for `argparse`.
        """
        names = [name, *options.get("aliases", ())]
        taken = [known for known in names if known in self._commands.choices]
        for known in taken:
            owner = self._all.owners.get(known)
            self._all.conflicts[known] = contested("command", known, owner, self._owner)
        if taken:
            return CommandParser(prog=f"megaopt {name}")
        parser: ArgumentParser = self._commands.add_parser(name, **options)
        self._all.owners.update(dict.fromkeys(names, self._owner))
        return parser

    @property
    def choices(self) -> Mapping[str, ArgumentParser]:
        """The commands that there are, to look at."""
        return MappingProxyType(dict(self._commands.choices))


@define
class PluginCommands:
    """The commands that plugins have added to `megaopt`.

    Args:
        owners: command to the plugin that brings it.
        conflicts: command to the error for whoever asks for one that two bring.
        failed: the errors of plugins whose hook raised.
    """

    owners: dict[str, PluginInfo] = field(factory=dict)
    conflicts: dict[str, DuplicateNameError] = field(factory=dict)
    failed: list[PluginHookError] = field(factory=list)

    def add_all(self, registry: PluginRegistry, commands: Commands) -> None:
        """Ask every plugin for its commands; one that fails is noted and harms no other.

        Args:
            registry: the plugins.
            commands: what `ArgumentParser.add_subparsers` returned.
        """
        for plugin in registry.command_plugins():
            try:
                plugin.call("megaopt_commands", commands=_OwnCommands(commands, plugin.info, self))
            except PluginHookError as error:
                self.failed.append(error)

    def require_one_owner(self, name: str) -> None:
        """Raise if two plugins bring a command; one of the program's own stays its own.

        Args:
            name: the command.

        Raises:
            DuplicateNameError: they do.
        """
        if name in self.conflicts and name in self.owners:
            raise self.conflicts[name]

    def run(self, name: str, parsed: Namespace) -> int:
        """Run a command; what goes wrong in one of a plugin's is said in the plugin's name.

        Args:
            name: the command.
            parsed: its arguments.

        Returns:
            Its exit status.

        Raises:
            PluginError: a plugin's command exits by itself with an error, or is not made as a command is.
        """
        owner = self.owners.get(name)
        if owner is None:
            return int(parsed.run(parsed) or 0)
        what = f"command {name!r} of {owner}"
        run = getattr(parsed, "run", None)
        if not callable(run):
            raise PluginError(f"{what} has no function to run: parser.set_defaults(run=...)")
        try:
            status = run(parsed)
        except SystemExit as exit_:
            if exit_.code in (None, 0):
                return 0
            raise PluginError(f"{what} ended with {words_of(exit_)}") from exit_
        except (MegaoptError, BrokenPipeError):
            raise
        except Exception as error:
            error.add_note(f"This came from {what}.")
            raise
        if not isinstance(status, int | None):
            raise PluginError(f"{what} returned {type(status).__name__}; it must return an exit status")
        return int(status or 0)
