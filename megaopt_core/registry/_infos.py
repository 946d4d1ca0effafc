"""What is known about a plugin before it is imported."""

from __future__ import annotations

import traceback
from enum import StrEnum
from importlib.metadata import EntryPoint

from attrs import evolve, field, frozen

from megaopt_core.errors import DuplicateNameError, PluginHookError
from megaopt_core.registry._faults import words_of

__all__ = ["CORE_MODULE", "PluginInfo", "PluginStatus", "contested"]

CORE_MODULE = "megaopt_core.builtins"
"""What the entry point of the core's own plugin names."""


class PluginStatus(StrEnum):
    """What became of a plugin.

    `AVAILABLE`: installed, not imported yet. `BLOCKED`: an environment variable excludes it. `LOADED`: works.
    `BROKEN`: failed to load.
    """

    AVAILABLE = "available"
    BLOCKED = "blocked"
    LOADED = "loaded"
    BROKEN = "broken"


@frozen
class PluginInfo:
    """What is known about a plugin without asking it.

    Args:
        name: the entry point's name.
        module: what the entry point names.
        distribution: the installed distribution; None for an entry point made by hand.
        version: its version.
        status: what became of the plugin.
        error: why it is blocked or broken, in one line.
        traceback: of the failure; empty unless the plugin is broken.
    """

    name: str
    module: str
    distribution: str | None = None
    version: str | None = None
    status: PluginStatus = PluginStatus.AVAILABLE
    error: str = ""
    traceback: str = field(default="", repr=False)

    @classmethod
    def of(cls, point: EntryPoint) -> PluginInfo:
        """Return what an entry point says about itself.

        Args:
            point: the entry point; it is not loaded.
        """
        told = (None, None) if point.dist is None else (point.dist.name, point.dist.version)
        return cls(point.name, point.value, *told)

    def broken_by(self, error: BaseException) -> PluginInfo:
        """Return this with status broken, and what broke it in one line.

        Args:
            error: what the plugin raised.
        """
        words = " ".join(map(str.strip, words_of(error).splitlines()))
        where = "".join(traceback.format_exception(error))
        return evolve(self, status=PluginStatus.BROKEN, error=words, traceback=where)

    def failed_in(self, hook: str, words: str) -> PluginHookError:
        """Return the error for what the plugin does wrong in a hook.

        Args:
            hook: the hook's name.
            words: what it does.
        """
        return PluginHookError(f"{self} failed in hook {hook}: {words}", plugin=self.name, hook=hook)

    def wrong_answer(self, hook: str, words: str) -> PluginHookError:
        """Return the error for what the plugin has answered a hook and must not.

        Args:
            hook: the hook's name.
            words: what it did, behind the hook's name, and what it must do.
        """
        return PluginHookError(f"{self}: {hook} {words}", plugin=self.name, hook=hook)

    def goes_by(self, name: str) -> bool:
        """Return whether a name means this plugin: its own or its distribution's, which may be spelt with `_` for `-`.

        Args:
            name: a name that a person wrote.
        """
        return _normal(name) in {_normal(self.name), _normal(self.distribution or self.name)}

    @property
    def is_core(self) -> bool:
        """True for the core's own plugin, which cannot be left out."""
        return self.module == CORE_MODULE

    @property
    def source(self) -> str:
        """Distribution and version, or the module where there is no distribution."""
        return f"{self.distribution} {self.version}" if self.distribution else self.module

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.source})"


def contested(
    what: str, name: str, first: PluginInfo | None, second: PluginInfo, *, by: str = "given by"
) -> DuplicateNameError:
    """Return the error for a name that two plugins give.

    Args:
        what: what it is, in words.
        name: the name.
        first: who gives it; None: the core.
        second: who gives it too.
        by: how they do.
    """
    core = "megaopt-core"
    return DuplicateNameError(
        f"{what} {name!r} is {by} {first or core} and by {second}; uninstall one of them, or block it: "
        f"MEGAOPT_DISABLE_PLUGINS={second.distribution or second.name}",
        name=name,
        owners=(core if first is None else first.source, second.source),
    )


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")
