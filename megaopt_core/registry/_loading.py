"""Loading one plugin by itself, so that a bad one harms no other."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint

import attrs
import pluggy
from attrs import frozen

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.plugin_api._schedule_style import ScheduleStyle
from megaopt_core.registry._faults import loading, words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._plugin_hooks import import_plugin
from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = [
    "LoadedPlugin",
    "check_entry",
    "load_plugin",
]

_STRATEGY: type[ShardingStrategy] = ShardingStrategy  # type: ignore[type-abstract]


@frozen(eq=False)
class LoadedPlugin:
    """A plugin that works, with what it offers.

    Args:
        info: who it is.
        hooks: the hooks that it implements.
        optimizers: optimizer name to entry.
        strategies: strategy name to strategy.
        schedules: style name to style.
        precision_policies: policy name to class.
        core_fields: names of the core's configuration fields; only the core's own plugin has any.
    """

    info: PluginInfo
    hooks: pluggy.HookRelay
    optimizers: Mapping[str, OptimizerEntry]
    strategies: Mapping[str, ShardingStrategy]
    schedules: Mapping[str, ScheduleStyle]
    precision_policies: Mapping[str, type]
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
        with loading(str(info), info.name):
            plugin, hooks = import_plugin(point, info)
            optimizers = _offered(hooks, "megaopt_optimizer_entries", OptimizerEntry)
            strategies = _offered(hooks, "megaopt_sharding_strategies", _STRATEGY)
            schedules = _offered(hooks, "megaopt_schedules", ScheduleStyle)
            policies: dict[str, type] = _offered(hooks, "megaopt_precision_policies", type)
        loaded = attrs.evolve(info, status=PluginStatus.LOADED)
        for name, entry in optimizers.items():
            check_entry(name, entry, core_fields)
        for name, style in schedules.items():
            _require_settings(f"schedule {name!r}", style.settings)
        # The configuration lies above the registry, so the core's own plugin brings the names of its fields.
        fields = frozenset(plugin.core_fields) if info.is_core else frozenset[str]()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a plugin may fail in any way and must not take others down
        return info.broken_by(error)
    return LoadedPlugin(loaded, hooks, optimizers, strategies, schedules, policies, fields)


def _offered[T](hooks: pluggy.HookRelay, hook: str, kind: type[T]) -> dict[str, T]:
    offered: dict[str, T] = {}
    for result in getattr(hooks, hook)():
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
    """Raise unless an entry's words, switches and settings can be used.

    Args:
        name: the optimizer's name.
        entry: its entry.
        core_fields: names of the core's configuration fields.

    Raises:
        PluginError: they cannot.
    """
    for kind, attributes in _KINDS.items():
        for attribute in attributes:
            given = type(getattr(entry, attribute))
            if given is not kind:
                raise PluginError(
                    f"optimizer {name!r}: {attribute} is of type {given.__name__}; it must be a {kind.__name__}"
                )
    _require_settings(f"optimizer {name!r}", entry.settings)
    if entry.settings is None:
        return
    if not entry.setting_prefixes:
        raise PluginError(f"optimizer {name!r} has settings but no setting_prefixes")
    for setting in attrs.fields(entry.settings):
        full = f"{entry.setting_prefixes[0]}_{setting.name}"
        if full in core_fields:
            raise PluginError(
                f"setting {full!r} of optimizer {name!r} is a field of the core's configuration; "
                "give the optimizer another setting prefix"
            )


_KINDS = {str: ("description", "example"), bool: ("supports_fp16", "supports_peers")}

_INSTEAD: Mapping[type, str] = {
    list: "a tuple, or field(factory=list)",
    dict: "field(factory=dict)",
    set: "a frozenset, or field(factory=set)",
}
"""What changes in place to what to write as a default in its place."""


def _require_settings(whose: str, settings: type | None) -> None:
    """Raise unless a settings class can be used, and does not silently do what nobody has meant.

    It is one of attrs, takes its own defaults, shares none that can be changed, and its choices are several texts.
    """
    if settings is None:
        return
    if not (isinstance(settings, type) and attrs.has(settings)):
        raise PluginError(f"{whose}: settings={settings!r} is no attrs class")
    try:
        made = settings()
    except Exception as error:
        raise PluginError(
            f"{whose}: {settings.__name__} cannot be made of its defaults: {words_of(error)}"
        ) from error
    for setting in attrs.fields(settings):
        choices = setting.metadata.get("choices", ())
        if isinstance(choices, str):
            raise PluginError(
                f"{whose}: {settings.__name__}: the choices of {setting.name!r} are the text {choices!r}; they must be "
                f"a tuple of texts: ({choices!r},)"
            )
        kind = next((each for each in _INSTEAD if isinstance(setting.default, each)), None)
        # A converter may make a tuple of it.
        if kind is not None and getattr(made, setting.name) is setting.default:
            raise PluginError(
                f"{whose}: {settings.__name__}: the default of {setting.name!r} is a {kind.__name__}, which all "
                f"configurations would share; give {_INSTEAD[kind]}"
            )
