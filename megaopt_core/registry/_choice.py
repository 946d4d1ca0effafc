"""Which plugins the environment lets in."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import frozen

from megaopt_core.registry._infos import PluginInfo, PluginStatus

__all__ = ["ALLOW", "DISABLE", "PluginChoice"]

DISABLE = "MEGAOPT_DISABLE_PLUGINS"
"""Environment variable: the plugins named here, separated by commas, are left out."""

ALLOW = "MEGAOPT_PLUGINS"
"""Environment variable: only the plugins named here are let in; empty means none but the core's own."""


@frozen
class PluginChoice:
    """The two environment variables, read.

    Args:
        disabled: names that are blocked.
        allowed: names that are let in; None: all.

    Example:
        >>> choice = PluginChoice.from_environ({"MEGAOPT_DISABLE_PLUGINS": "a, megaopt-b"})
        >>> choice.apply(PluginInfo("b", "b.plugin", "megaopt-b", "1.0")).error
        'MEGAOPT_DISABLE_PLUGINS=a,megaopt-b blocks it'
    """

    disabled: tuple[str, ...] = ()
    allowed: tuple[str, ...] | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginChoice:
        """Read the variables.

        Args:
            environ: `os.environ`, or a stand-in.
        """
        allowed = _names(environ[ALLOW]) if ALLOW in environ else None
        return cls(_names(environ.get(DISABLE, "")), allowed)

    def apply(self, info: PluginInfo) -> PluginInfo:
        """Return the info, with status blocked and the reason if the plugin is left out.

        Args:
            info: a plugin; it may be named by its entry point or by its distribution.
        """
        if info.is_core:
            return info
        if any(info.goes_by(name) for name in self.disabled):
            return _blocked(info, f"{DISABLE}={','.join(self.disabled)} blocks it")
        if self.allowed is not None and not any(info.goes_by(name) for name in self.allowed):
            return _blocked(info, f"{ALLOW}={','.join(self.allowed)} leaves it out")
        return info


def _blocked(info: PluginInfo, why: str) -> PluginInfo:
    return attrs.evolve(info, status=PluginStatus.BLOCKED, error=why)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
