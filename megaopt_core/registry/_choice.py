"""Which plugins are installed, as far as that can be read, and which of them the environment lets in."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points, version

import attrs
from attrs import frozen

from megaopt_core.errors import BrokenPluginWarning
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import CORE_MODULE, PluginInfo, PluginStatus, told_by

__all__ = ["ALLOW", "CORE_PLUGIN", "DISABLE", "GROUP", "PluginChoice", "in_one_order"]

GROUP = "megaopt"
"""The entry-point group in which plugins are found."""

CORE_PLUGIN = EntryPoint(name="core", value=CORE_MODULE, group=GROUP)
"""The core's own plugin, which is there even where the core runs without being installed."""

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

    def named_in_vain(self, plugins: Iterable[PluginInfo]) -> list[str]:
        """Return a line for every name that no installed plugin goes by, such as a misspelt one.

        Args:
            plugins: every installed plugin.
        """
        plugins = tuple(plugins)
        return [
            f"{variable} names {name!r}, and no installed plugin goes by that"
            for variable, names in ((DISABLE, self.disabled), (ALLOW, self.allowed or ()))
            for name in names
            if not any(info.goes_by(name) for info in plugins)
        ]


def _blocked(info: PluginInfo, why: str) -> PluginInfo:
    return attrs.evolve(info, status=PluginStatus.BLOCKED, error=why)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def in_one_order(given: Iterable[EntryPoint] | None) -> list[EntryPoint]:
    """Return entry points, the core's own first, the others by name, so that every rank has one order.

    Args:
        given: the entry points; None: those of group `megaopt` that are installed.
    """
    points = _once(_installed() if given is None else given)
    core = [point for point in points if point.value == CORE_MODULE]
    others = [point for point in points if point.value != CORE_MODULE]
    others.sort(key=lambda point: (point.name, told_by(point)[0] or "", point.value))
    return [*(core[:1] or [CORE_PLUGIN]), *others]


def _installed() -> list[EntryPoint]:
    """Return those of the group that can be read; Python by itself reads all distributions or none."""
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # noqa: BLE001 - the files of strangers; which error depends on the version of Python
        return [point for each in distributions() for point in _points_of(each) if point.group == GROUP]


def _points_of(distribution: Distribution) -> list[EntryPoint]:
    try:
        return list(distribution.entry_points)
    except Exception as error:  # noqa: BLE001 - as above
        if f"[{GROUP}" in (distribution.read_text("entry_points.txt") or ""):
            warnings.warn(
                f"{distribution.name}: its entry_points.txt cannot be read, and its plugins are left out: "
                f"{words_of(error)}",
                BrokenPluginWarning,
                stacklevel=6,
            )
        return []


def _once(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """Return each entry point of a distribution once: an interrupted installer leaves a second folder of metadata."""
    found: dict[tuple[str, str, str | None], EntryPoint] = {}
    for point in points:
        name, its_version = told_by(point)
        key = (point.name, point.value, name)
        if key not in found or (name and its_version == version(name)):
            found[key] = point
    owned = {key[:2] for key in found if key[2]}
    return [point for (*what, name), point in found.items() if name or tuple(what) not in owned]
