"""What is installed: plugins that are found without importing them, and loaded one by one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points, version
from typing import TYPE_CHECKING

from attrs import evolve

from megaopt_core.errors import BrokenPluginWarning, PluginError, warn_user
from megaopt_core.registry._faults import loading, words_of
from megaopt_core.registry._infos import CORE_MODULE, PluginInfo, PluginStatus
from megaopt_core.registry._plugin_hooks import import_plugin, may_implement

if TYPE_CHECKING:  # what is loaded needs torch; listing plugins and their commands does not
    import pluggy

    from megaopt_core.registry._contents import Contents
    from megaopt_core.registry._loading import LoadedPlugin

__all__ = ["ALLOW", "DISABLE", "GROUP", "Installation"]

type _Found = tuple[EntryPoint, PluginInfo]

GROUP = "megaopt"
"""The entry-point group in which plugins are found."""

DISABLE = "MEGAOPT_DISABLE_PLUGINS"
"""Environment variable: the plugins named here, separated by commas, are left out."""

ALLOW = "MEGAOPT_PLUGINS"
"""Environment variable: only the plugins named here are let in; empty means none but the core's own."""

CORE_PLUGIN = EntryPoint(name="core", value=CORE_MODULE, group=GROUP)
"""The core's own plugin, which is there even where the core runs without being installed."""


class Installation:
    """The plugins that are installed, each loaded by itself when somebody asks what they offer.

    Args:
        given: the entry points to use; None: those of group `megaopt` that are installed.
        environ: where the two variables are read from.
    """

    def __init__(self, given: Iterable[EntryPoint] | None, environ: Mapping[str, str]) -> None:
        found = _in_one_order(given)
        self._points = [point for point, _ in found]
        self._chosen = {name: _names(environ[name]) for name in (DISABLE, ALLOW) if name in environ}
        self.infos = [self._let_in(info) for _, info in found]
        self.lock = threading.RLock()
        self._contents: Contents | None = None
        self._loading = False
        self._warned: list[PluginInfo] = []

    def loaded_plugins(self) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that have been loaded and work; loads none."""
        return () if self._contents is None else self._contents.plugins

    def named_in_vain(self) -> list[str]:
        """Return a line for every name in the two variables that no installed plugin goes by."""
        return [
            f"{variable} names {name!r}, and no installed plugin goes by that"
            for variable, names in self._chosen.items()
            for name in names
            if not any(info.goes_by(name) for info in self.infos)
        ]

    def _let_in(self, info: PluginInfo) -> PluginInfo:
        """Return what is known of a plugin, with status blocked and the reason where the environment leaves it out."""
        for variable, names in () if info.is_core else self._chosen.items():
            blocks = variable == DISABLE
            if any(map(info.goes_by, names)) is blocks:
                does = "blocks it" if blocks else "leaves it out"
                return evolve(info, status=PluginStatus.BLOCKED, error=f"{variable}={','.join(names)} {does}")
        return info

    def contents(self) -> Contents:
        """Return what all plugins together offer; the first call loads them."""
        with self.lock:
            if self._contents is None:
                self._contents = self._load_all()
                self._warn_of_broken()
            return self._contents

    def command_hooks(self) -> tuple[tuple[PluginInfo, pluggy.HookRelay], ...]:
        """Return the plugins that may bring commands, with their hooks; before they are loaded, imports only these."""
        with self.lock:
            if self._contents is not None:
                return tuple((plugin.info, plugin.hooks) for plugin in self._contents.plugins)
            found = []
            with self._importing():
                for index, (point, info) in enumerate(zip(self._points, self.infos, strict=True)):
                    is_open = info.status is PluginStatus.AVAILABLE and not info.is_core
                    if not (is_open and may_implement(point, "megaopt_commands")):
                        continue
                    try:
                        with loading(str(info), info.name):
                            found.append((info, import_plugin(point, info)[1]))
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:  # noqa: BLE001 - a plugin must not take others down
                        self.infos[index] = info.broken_by(error)
            self._warn_of_broken()
            return tuple(found)

    @contextmanager
    def _importing(self) -> Iterator[None]:
        if self._loading:
            raise PluginError(
                "plugins are being loaded: a plugin must not look others up while it is imported"
            )
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def _warn_of_broken(self) -> None:
        """Warn of every broken plugin once."""
        for info in self.infos:
            if info.status is PluginStatus.BROKEN and info not in self._warned:
                self._warned.append(info)
                warn_user(f"{info} failed to load and is left out: {info.error}", BrokenPluginWarning)

    def _load_all(self) -> Contents:
        from megaopt_core.registry._contents import collect
        from megaopt_core.registry._loading import LoadedPlugin, load_plugin

        with self._importing():
            plugins: list[LoadedPlugin] = []
            core_fields: frozenset[str] = frozenset()
            for index, (point, info) in enumerate(zip(self._points, self.infos, strict=True)):
                if info.status in (PluginStatus.BLOCKED, PluginStatus.BROKEN):
                    continue
                result = load_plugin(point, info, core_fields)
                if isinstance(result, LoadedPlugin):
                    plugins.append(result)
                    core_fields |= result.core_fields
                    self.infos[index] = result.info
                else:
                    self.infos[index] = result
            return collect(tuple(plugins))


def _in_one_order(given: Iterable[EntryPoint] | None) -> list[_Found]:
    """Return entry points, the core's own first, the others by name, so that every rank has one order.

    Args:
        given: the entry points; None: those of group `megaopt` that are installed.
    """
    # What a distribution says of itself is read from its files each time that it is asked.
    points = _installed() if given is None else given
    found = _once([(point, PluginInfo.of(point)) for point in points])
    core = [each for each in found if each[1].is_core]
    others = [each for each in found if not each[1].is_core]
    others.sort(key=lambda each: (each[1].name, each[1].distribution or "", each[1].module))
    return [*(core[:1] or [(CORE_PLUGIN, PluginInfo.of(CORE_PLUGIN))]), *others]


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
            warn_user(
                f"{distribution.name}: its entry_points.txt cannot be read, and its plugins are left out: "
                f"{words_of(error)}",
                BrokenPluginWarning,
            )
        return []


def _once(points: Iterable[_Found]) -> list[_Found]:
    """Return each entry point of a distribution once: an interrupted installer leaves a second folder of metadata."""
    found: dict[tuple[str, str, str | None], _Found] = {}
    for point, info in points:
        key = (info.name, info.module, info.distribution)
        if key not in found or (info.distribution and info.version == version(info.distribution)):
            found[key] = point, info
    owned = {key[:2] for key in found if key[2]}
    return [each for (*what, name), each in found.items() if name or tuple(what) not in owned]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
