"""Loading one plugin by itself, so that a bad one harms no other."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from enum import StrEnum
from importlib.metadata import EntryPoint
from typing import Any

import attrs
import pluggy
from attrs import field, frozen

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import _hookspecs as hookspecs
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._faults import naming_slow_imports, traceback_of, words_of
from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = [
    "API_VERSION",
    "CORE_MODULE",
    "LoadedPlugin",
    "PluginInfo",
    "PluginStatus",
    "check_entry",
    "load_plugin",
]

API_VERSION = "1"
"""The `megaopt_api` that a plugin has to declare."""

CORE_MODULE = "megaopt_core.builtins"
"""What the entry point of the core's own plugin names."""

_STRATEGY: type[ShardingStrategy] = ShardingStrategy  # type: ignore[type-abstract]
_HOOKS = tuple(name for name in hookspecs.__all__ if name.startswith("megaopt_"))


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
        dist = point.dist
        if dist is None:
            return cls(point.name, point.value)
        return cls(point.name, point.value, dist.name, dist.version)

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


def _normal(name: str) -> str:
    return name.lower().replace("_", "-")


@frozen(eq=False)
class LoadedPlugin:
    """A plugin that works, with what it offers.

    Args:
        info: who it is.
        hooks: the hooks that it implements.
        optimizers: optimizer name to entry.
        strategies: strategy name to strategy.
        schedules: style name to style.
        core_fields: names of the core's configuration fields; only the core's own plugin has any.
    """

    info: PluginInfo
    hooks: pluggy.HookRelay
    optimizers: Mapping[str, OptimizerEntry]
    strategies: Mapping[str, ShardingStrategy]
    schedules: Mapping[str, ScheduleStyle]
    core_fields: frozenset[str] = frozenset()

    def has(self, hook: str) -> bool:
        """Return whether the plugin implements a hook.

        Args:
            hook: the hook's name.
        """
        return bool(getattr(self.hooks, hook).get_hookimpls())


def load_plugin(
    point: EntryPoint, info: PluginInfo, core_fields: Collection[str] = ()
) -> LoadedPlugin | PluginInfo:
    """Import a plugin, check it, and ask it what it offers.

    Args:
        point: its entry point.
        info: what is known about it.
        core_fields: names of the core's configuration fields, which no setting of a plugin may have.

    Returns:
        The plugin, or the info with status broken, error and traceback: whatever the plugin does wrong stays here.
    """
    try:
        with naming_slow_imports(str(info)):
            plugin = point.load()
        _check_api(plugin)
        manager = _register_alone(info.name, plugin)
        loaded = attrs.evolve(info, status=PluginStatus.LOADED)
        optimizers = _offered(manager, "megaopt_optimizer_entries", OptimizerEntry)
        for name, entry in optimizers.items():
            check_entry(name, entry, core_fields)
        strategies = _offered(manager, "megaopt_sharding_strategies", _STRATEGY)
        schedules = _offered(manager, "megaopt_schedules", ScheduleStyle)
        # The configuration lies above the registry, so the core's own plugin brings the names of its fields.
        fields = frozenset(plugin.core_fields) if info.is_core else frozenset[str]()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin may fail in any way and must not take others down
        return attrs.evolve(
            info, status=PluginStatus.BROKEN, error=words_of(error), traceback=traceback_of(error)
        )
    return LoadedPlugin(loaded, manager.hook, optimizers, strategies, schedules, fields)


def _check_api(plugin: Any) -> None:
    declared = getattr(plugin, "megaopt_api", None)
    if declared is None:
        raise PluginError(
            f'it declares no megaopt_api; plugins for this megaopt declare megaopt_api = "{API_VERSION}"'
        )
    if declared != API_VERSION:
        raise PluginError(
            f"it declares megaopt_api = {declared!r}, and this megaopt loads plugins that declare "
            f"{API_VERSION!r}; upgrade the older of the two"
        )


def _register_alone(name: str, plugin: Any) -> pluggy.PluginManager:
    """Register a plugin in a manager of its own, where all mistakes in its hooks show."""
    for attribute, value in inspect.getmembers(plugin, inspect.isroutine):
        if attribute.startswith("megaopt_") and not hasattr(value, "megaopt_impl"):
            raise PluginError(
                f"its function {attribute!r} is not marked with @hookimpl{_meant(attribute, _HOOKS)}"
            )
    manager = pluggy.PluginManager("megaopt")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    for hook in manager.hook.__dict__.values():
        if not isinstance(hook, pluggy.HookCaller):
            continue
        for impl in hook.get_hookimpls():
            if not hook.has_spec() and not impl.optionalhook:
                raise PluginError(f"it implements {hook.name!r}, which is no hook{_meant(hook.name, _HOOKS)}")
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(f"its {hook.name!r} is a wrapper; megaopt calls every plugin by itself")
    return manager


def _offered[T](manager: pluggy.PluginManager, hook: str, kind: type[T]) -> dict[str, T]:
    offered: dict[str, T] = {}
    for result in getattr(manager.hook, hook)():
        if not isinstance(result, Mapping):
            raise PluginError(
                f"{hook} returned {type(result).__name__}; it must return {{name: {kind.__name__}}}"
            )
        for name, value in result.items():
            if not (isinstance(name, str) and name):
                raise PluginError(f"{hook} returned the name {name!r}; a name is a non-empty str")
            if not isinstance(value, kind):
                raise PluginError(
                    f"{hook} returned {name!r}: {type(value).__name__}; it must be of type {kind.__name__}"
                )
            offered[name] = value
    return offered


def check_entry(name: str, entry: OptimizerEntry, core_fields: Collection[str]) -> None:
    """Raise unless an entry's words and settings can be used.

    Args:
        name: the optimizer's name.
        entry: its entry.
        core_fields: names of the core's configuration fields.

    Raises:
        PluginError: they cannot.
    """
    for attribute in ("description", "example"):
        if not isinstance(getattr(entry, attribute), str):
            raise PluginError(f"optimizer {name!r}: {attribute}={getattr(entry, attribute)!r} is no str")
    if not isinstance(entry.default_param_overrides, Mapping):
        raise PluginError(
            f"optimizer {name!r}: default_param_overrides={entry.default_param_overrides!r} is no mapping"
        )
    if entry.settings is None:
        return
    if not attrs.has(entry.settings):
        raise PluginError(f"optimizer {name!r}: settings={entry.settings!r} is no attrs class")
    if not entry.setting_prefixes:
        raise PluginError(f"optimizer {name!r} has settings but no setting_prefixes")
    required = [setting.name for setting in attrs.fields(entry.settings) if setting.default is attrs.NOTHING]
    if required:
        raise PluginError(
            f"optimizer {name!r}: {entry.settings.__name__} has no default for {', '.join(required)}"
        )
    for setting in attrs.fields(entry.settings):
        full = f"{entry.setting_prefixes[0]}_{setting.name}"
        if full in core_fields:
            raise PluginError(
                f"setting {full!r} of optimizer {name!r} is a field of the core's configuration; "
                "give the optimizer another setting prefix"
            )
    entry.settings()  # its own validators must take its own defaults


def _meant(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close and close[0] != name else ""
