"""The registry: which plugins are installed, and what they offer."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal

from megaopt_core.errors import (
    BrokenPluginWarning,
    DuplicateNameError,
    MegaoptError,
    PluginError,
    PluginHookError,
)
from megaopt_core.registry._choice import CORE_PLUGIN, GROUP, PluginChoice, in_one_order
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._missing import Kind, missing
from megaopt_core.registry._plugin_hooks import import_plugin, may_implement

if TYPE_CHECKING:  # what is loaded needs torch; listing plugins and their commands does not
    import pluggy

    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.plugin_api._schedule_style import ScheduleStyle
    from megaopt_core.registry._contents import Contents
    from megaopt_core.registry._loading import LoadedPlugin
    from megaopt_core.registry._setting_owners import SettingInfo
    from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = ["CORE_PLUGIN", "GROUP", "PluginRegistry", "get_registry", "reset_registry"]


class PluginRegistry:
    """Finds plugins without importing them, loads each by itself at the first look-up, and answers by name.

    A plugin that fails to load is kept as broken: it is warned of once, and named again in the error of whoever asks
    for what it should have provided. A name that two plugins give raises for whoever asks for that name, until one of
    them is uninstalled or blocked: `MEGAOPT_DISABLE_PLUGINS=a,b` blocks plugins by the name of their entry point or of
    their distribution, `MEGAOPT_PLUGINS=a,b` allows only those. The core's own plugin cannot be blocked.

    Args:
        entry_points: the entry points to use; None: those of group `megaopt` that are installed.
        environ: where the two variables are read from; None: `os.environ`.

    Example:
        >>> registry = PluginRegistry(entry_points=[], environ={})
        >>> [(info.name, info.status.value) for info in registry.plugins()]
        [('core', 'available')]
        >>> sorted(registry.optimizers())
        []
    """

    def __init__(
        self, entry_points: Iterable[EntryPoint] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._points = in_one_order(entry_points)
        self._choice = PluginChoice.from_environ(os.environ if environ is None else environ)
        self._infos = [self._choice.apply(PluginInfo.of(point)) for point in self._points]
        self._plugins: tuple[LoadedPlugin, ...] = ()
        self._contents: Contents | None = None
        self._resolved: dict[str, tuple[OptimizerEntry, PluginInfo]] = {}
        self._resolved_settings: dict[str, SettingInfo] = {}
        self._loading = False
        self._warned: list[PluginInfo] = []
        self._lock = threading.RLock()

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return every installed plugin, the core's own first, then by name; imports none."""
        return tuple(self._infos)

    def named_in_vain(self) -> list[str]:
        """Return a line for every name in the two variables that no installed plugin goes by."""
        return self._choice.named_in_vain(self._infos)

    def loaded_plugins(self) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that have been loaded and work, with what each offers; loads none."""
        return self._plugins

    def load(self) -> None:
        """Load every plugin that is not blocked, once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        self._loaded()

    def command_hooks(self) -> tuple[tuple[PluginInfo, pluggy.HookRelay], ...]:
        """Return the plugins that may bring commands, with their hooks.

        Before the plugins are loaded, only those are imported whose source names the hook `megaopt_commands`, and none
        is asked for anything else: a plugin whose module does not import torch shows its commands at once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        with self._lock:
            if self._contents is not None:
                return tuple((plugin.info, plugin.hooks) for plugin in self._plugins)
            found = []
            with self._importing():
                for index, (point, info) in enumerate(zip(self._points, self._infos, strict=True)):
                    if not _may_bring_commands(point, info):
                        continue
                    try:
                        found.append((info, import_plugin(point, info)[1]))
                    except KeyboardInterrupt:
                        raise
                    except BaseException as error:  # noqa: BLE001 - a plugin must not take others down
                        self._infos[index] = info.broken_by(error)
            self._warn_of_broken()
            return tuple(found)

    def conflicts(self) -> tuple[DuplicateNameError, ...]:
        """Return an error for every name that two plugins give."""
        return tuple(self._loaded().conflicts.values())

    def require_one_owner(self, kind: str, name: str) -> None:
        """Raise if two plugins give a name.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"setting"` or `"plugin"`.
            name: the name.

        Raises:
            DuplicateNameError: they do; it names both.
        """
        self._loaded().require_one_owner(kind, name)

    def optimizer(self, name: str) -> OptimizerEntry:
        """Return the entry of an optimizer; a name that no plugin lists is given to those that resolve names.

        Args:
            name: what users write in `optimizer="..."`.

        Raises:
            PluginNotInstalledError: it comes with a plugin that is not installed, or is blocked.
            BrokenPluginError: it should come from a plugin that failed to load.
            UnknownNameError: nobody offers it.
            DuplicateNameError: two plugins give one name.
        """
        return self._optimizer(name)[0]

    def has_optimizer(self, name: str) -> bool:
        """Return whether an optimizer can be had here, listed or resolved.

        Args:
            name: what users write in `optimizer="..."`.
        """
        try:
            self._optimizer(name)
        except PluginError:
            return False
        return True

    def optimizers(self) -> dict[str, OptimizerEntry]:
        """Return every optimizer that one plugin lists by name, in the order of the plugins."""
        return {name: entry for name, (entry, _) in self._loaded().optimizers.items()}

    def strategy(self, name: str) -> ShardingStrategy:
        """Return a sharding strategy; raises as :meth:`optimizer` does.

        Args:
            name: what users write in `sharding="..."`.
        """
        return self._look_up("strategy", self._loaded().strategies, name)[0]

    def strategies(self) -> dict[str, ShardingStrategy]:
        """Return every sharding strategy that one plugin gives, by name."""
        return {name: strategy for name, (strategy, _) in self._loaded().strategies.items()}

    def schedule(self, name: str, kind: Literal["lr", "wd"] | None = None) -> ScheduleStyle:
        """Return a schedule style; raises as :meth:`optimizer` does.

        Args:
            name: what users write in `lr_decay_style="..."` or `wd_incr_style="..."`.
            kind: what it has to serve: `"lr"`, `"wd"`, or None for either.
        """
        offered = {
            style: found
            for style, found in self._loaded().schedules.items()
            if kind is None or _serves(found[0], kind)
        }
        return self._look_up("schedule", offered, name)[0]

    def schedules(self, kind: Literal["lr", "wd"] | None = None) -> dict[str, ScheduleStyle]:
        """Return every schedule style that one plugin gives, by name.

        Args:
            kind: only those that serve `"lr"` or `"wd"`; None for all.
        """
        found = self._loaded().schedules.items()
        return {name: style for name, (style, _) in found if kind is None or _serves(style, kind)}

    def owner(self, kind: Kind, name: str) -> PluginInfo:
        """Return the plugin that offers something; raises as :meth:`optimizer` does.

        Args:
            kind: `"optimizer"`, `"strategy"` or `"schedule"`.
            name: its name.
        """
        if kind == "optimizer":
            return self._optimizer(name)[1]
        contents = self._loaded()
        offered: Mapping[str, tuple[Any, PluginInfo]] = (
            contents.strategies if kind == "strategy" else contents.schedules
        )
        return self._look_up(kind, offered, name)[1]

    def require_fallback(self, optimizer: str, fallback: str) -> None:
        """Raise as :meth:`optimizer` does for a fallback that is not there, and say whose fallback it is.

        Args:
            optimizer: the optimizer whose entry names it.
            fallback: what it names.

        Raises:
            MegaoptError: there is no such optimizer here, for the reason that the class of the error says.
        """
        try:
            self._optimizer(fallback)
        except MegaoptError as error:
            owner = self.owner("optimizer", optimizer)
            error.args = (f"{fallback!r} is the fallback of optimizer {optimizer!r} of {owner}: {error}",)
            raise

    @contextmanager
    def blaming(self, kind: Kind, name: str) -> Iterator[None]:
        """Name the plugin that offers something in whatever its code raises inside the block.

        Args:
            kind: `"optimizer"`, `"strategy"` or `"schedule"`.
            name: its name.

        Raises:
            PluginError: it raised something that is not one of megaopt's own errors.
        """
        try:
            yield
        except (MegaoptError, KeyboardInterrupt) as error:
            whose = str(self.owner(kind, name))
            if type(error) is PluginError and whose not in str(error):
                raise PluginError(f"{kind} {name!r} of {whose}: {error}") from error
            raise
        except BaseException as error:
            owner = self.owner(kind, name)
            if owner.is_core or _is_out_of_memory(error):
                raise
            raise PluginError(f"{kind} {name!r} of {owner} failed: {words_of(error)}") from error

    def setting_owners(self) -> dict[str, SettingInfo]:
        """Return every setting that one plugin adds to the configuration, by its full name.

        Those of a resolved optimizer are among them once it has been asked for.
        """
        return {**self._loaded().settings, **self._resolved_settings}

    def call_each(
        self, hook_name: str, /, *, failed: list[PluginHookError] | None = None, **kwargs: Any
    ) -> list[tuple[PluginInfo, Any]]:
        """Call a hook of every plugin that implements it, the core's first, then by the plugin's name.

        A configuration among the arguments is copied for each plugin: what one changes, no other sees.

        Args:
            hook_name: name of the hook.
            failed: where the errors of plugins that raise are put, so that the others are called; None: the first is
                raised.
            **kwargs: its arguments.

        Returns:
            `(plugin, result)` of every implementation whose result is not None; the order is the same on every rank.

        Raises:
            PluginHookError: a plugin raised; the message names it, and the error is the cause.
        """
        found = []
        for plugin in self._loaded().plugins:
            try:
                found += [(plugin.info, result) for result in _call(plugin, hook_name, kwargs)]
            except PluginHookError as error:
                if failed is None:
                    raise
                failed.append(error)
        return found

    def _loaded(self) -> Contents:
        with self._lock:
            if self._contents is None:
                self._load_all()
            assert self._contents is not None  # noqa: S101 - for the type checker
            return self._contents

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
        for info in self._infos:
            if info.status is PluginStatus.BROKEN and info not in self._warned:
                self._warned.append(info)
                warnings.warn(
                    f"{info} failed to load and is left out: {info.error}", BrokenPluginWarning, stacklevel=5
                )

    def _load_all(self) -> None:
        from megaopt_core.registry._contents import collect
        from megaopt_core.registry._loading import LoadedPlugin, load_plugin

        with self._importing():
            plugins: list[LoadedPlugin] = []
            core_fields: frozenset[str] = frozenset()
            for index, (point, info) in enumerate(zip(self._points, self._infos, strict=True)):
                if info.status is not PluginStatus.AVAILABLE:
                    continue
                result = load_plugin(point, info, core_fields)
                if isinstance(result, LoadedPlugin):
                    plugins.append(result)
                    core_fields |= result.core_fields
                    self._infos[index] = result.info
                else:
                    self._infos[index] = result
            self._plugins = tuple(plugins)
            self._contents = collect(self._plugins)
        self._warn_of_broken()

    def _optimizer(self, name: str) -> tuple[OptimizerEntry, PluginInfo]:
        contents = self._loaded()
        contents.require_one_owner("optimizer", name)
        found = contents.optimizers.get(name) or self._resolve(contents, name)
        return found or self._look_up("optimizer", contents.optimizers, name)

    def _resolve(self, contents: Contents, name: str) -> tuple[OptimizerEntry, PluginInfo] | None:
        from megaopt_core.registry._loading import check_entry
        from megaopt_core.registry._resolved import resolve_optimizer
        from megaopt_core.registry._setting_owners import find_owners

        with self._lock:
            if name in self._resolved:
                return self._resolved[name]
            found = resolve_optimizer(name, contents.plugins)
            if found is not None:
                resolved = {**self._resolved, name: found}
                owned = {**contents.optimizers, **resolved}
                settings, contested = find_owners([(each, *whose) for each, whose in owned.items()])
                for error in contested.values():
                    raise error
                core_fields = {field for plugin in contents.plugins for field in plugin.core_fields}
                check_entry(name, found[0], core_fields)
                self._resolved_settings = {
                    full: info for full, info in settings.items() if full not in contents.settings
                }
                self._resolved = resolved
            return found

    def _look_up[T](self, kind: Kind, table: Mapping[str, T], name: str) -> T:
        self.require_one_owner(kind, name)
        if name in table:
            return table[name]
        raise missing(kind, name, tuple(table), self._infos)


def _may_bring_commands(point: EntryPoint, info: PluginInfo) -> bool:
    if info.status is not PluginStatus.AVAILABLE or info.is_core:
        return False
    return may_implement(point, "megaopt_commands")


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _serves(style: ScheduleStyle, kind: Literal["lr", "wd"]) -> bool:
    return (style.learning_rate if kind == "lr" else style.weight_decay) is not None


def _call(plugin: LoadedPlugin, hook_name: str, kwargs: Mapping[str, Any]) -> list[Any]:
    given = {name: _own(name, value) for name, value in kwargs.items()}
    try:
        return list(getattr(plugin.hooks, hook_name)(**given))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginHookError(
            f"{plugin.info} failed in hook {hook_name}: {words_of(error)}",
            plugin=plugin.info.name,
            hook=hook_name,
        ) from error


def _own(name: str, value: Any) -> Any:
    """Return what a plugin may change as it likes; the models are what they are."""
    if name == "config":
        return copy.deepcopy(value)
    return list(value) if name == "model_chunks" else value


_registry: PluginRegistry | None = None
_registry_lock = threading.Lock()


def get_registry() -> PluginRegistry:
    """Return the registry of this process; it is made at the first call and loads no plugin by itself."""
    global _registry  # noqa: PLW0603 - one registry per process
    with _registry_lock:
        if _registry is None:
            _registry = PluginRegistry()
        return _registry


def reset_registry(registry: PluginRegistry | None = None) -> None:
    """Forget the registry of this process, for tests.

    Args:
        registry: what takes its place; None: a new one is made when it is asked for.
    """
    global _registry  # noqa: PLW0603 - one registry per process
    with _registry_lock:
        _registry = registry
