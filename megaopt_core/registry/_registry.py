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
    DuplicateNameError,
    MegaoptError,
    PluginError,
    PluginHookError,
)
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._installation import Installation
from megaopt_core.registry._missing import Kind, missing

if TYPE_CHECKING:  # what is loaded needs torch; listing plugins and their commands does not
    import pluggy

    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.plugin_api._schedule_style import ScheduleStyle
    from megaopt_core.registry._contents import Contents
    from megaopt_core.registry._loading import LoadedPlugin
    from megaopt_core.registry._setting_owners import SettingInfo
    from megaopt_core.sharding._protocol import ShardingStrategy

__all__ = ["PluginRegistry", "get_registry", "reset_registry"]


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
        self._installed = Installation(entry_points, os.environ if environ is None else environ)
        self._resolved: dict[str, tuple[OptimizerEntry, PluginInfo]] = {}
        self._resolved_settings: dict[str, SettingInfo] = {}

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return every installed plugin, the core's own first, then by name; imports none."""
        return tuple(self._installed.infos)

    def named_in_vain(self) -> list[str]:
        """Return a line for every name in the two variables that no installed plugin goes by."""
        return self._installed.named_in_vain()

    def loaded_plugins(self) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that have been loaded and work, with what each offers; loads none."""
        return self._installed.loaded_plugins()

    def load(self) -> None:
        """Load every plugin that is not blocked, once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        self._installed.contents()

    def command_hooks(self) -> tuple[tuple[PluginInfo, pluggy.HookRelay], ...]:
        """Return the plugins that may bring commands, with their hooks.

        Before the plugins are loaded, only those are imported whose source names the hook `megaopt_commands`, and none
        is asked for anything else: a plugin whose module does not import torch shows its commands at once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        return self._installed.command_hooks()

    def conflicts(self) -> tuple[DuplicateNameError, ...]:
        """Return an error for every name that two plugins give."""
        return tuple(self._installed.contents().conflicts.values())

    def require_one_owner(self, kind: str, name: str) -> None:
        """Raise if two plugins give a name.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"precision"`, `"setting"` or `"plugin"`.
            name: the name.

        Raises:
            DuplicateNameError: they do; it names both.
        """
        self._installed.contents().require_one_owner(kind, name)

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
        entry: OptimizerEntry = self._find("optimizer", name)[0]
        return entry

    def has_optimizer(self, name: str, *, listed: bool = False) -> bool:
        """Return whether an optimizer can be had here, listed or resolved.

        Args:
            name: what users write in `optimizer="..."`.
            listed: a plugin must list it: names from files are looked up so, for to resolve one may import a module.
        """
        if listed:
            return name in self._installed.contents().tables["optimizer"]
        try:
            self._find("optimizer", name)
        except PluginError:
            return False
        return True

    def optimizers(self) -> dict[str, OptimizerEntry]:
        """Return every optimizer that one plugin lists by name, in the order of the plugins."""
        return self._all("optimizer")

    def strategy(self, name: str) -> ShardingStrategy:
        """Return a sharding strategy; raises as :meth:`optimizer` does.

        Args:
            name: what users write in `sharding="..."`.
        """
        strategy: ShardingStrategy = self._find("strategy", name)[0]
        return strategy

    def strategies(self) -> dict[str, ShardingStrategy]:
        """Return every sharding strategy that one plugin gives, by name."""
        return self._all("strategy")

    def precision_policy(self, name: str) -> type:
        """Return the class of a precision policy, as it was given; raises as :meth:`optimizer` does.

        Args:
            name: what users write in `precision="..."`.
        """
        policy: type = self._find("precision", name)[0]
        return policy

    def precision_policies(self) -> dict[str, type]:
        """Return the class of every precision policy that one plugin gives, by name."""
        return self._all("precision")

    def schedule(self, name: str, kind: Literal["lr", "wd"] | None = None) -> ScheduleStyle:
        """Return a schedule style; raises as :meth:`optimizer` does.

        Args:
            name: what users write in `lr_decay_style="..."` or `wd_incr_style="..."`.
            kind: what it has to serve: `"lr"`, `"wd"`, or None for either.
        """
        known = self.schedules(kind)
        self.require_one_owner("schedule", name)
        if name not in known:
            raise missing("schedule", name, tuple(known), self._installed.infos)
        return known[name]

    def schedules(self, kind: Literal["lr", "wd"] | None = None) -> dict[str, ScheduleStyle]:
        """Return every schedule style that one plugin gives, by name.

        Args:
            kind: only those that serve `"lr"` or `"wd"`; None for all.
        """
        found: dict[str, ScheduleStyle] = self._all("schedule")
        return {name: style for name, style in found.items() if kind is None or style.serves(kind)}

    def owner(self, kind: Kind, name: str) -> PluginInfo:
        """Return the plugin that offers something; raises as :meth:`optimizer` does.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"` or `"precision"`.
            name: its name.
        """
        return self._find(kind, name)[1]

    def require_fallback(self, optimizer: str, fallback: str) -> None:
        """Raise as :meth:`optimizer` does for a fallback that is not there, and say whose fallback it is.

        Args:
            optimizer: the optimizer whose entry names it.
            fallback: what it names.

        Raises:
            MegaoptError: there is no such optimizer here, for the reason that the class of the error says.
        """
        try:
            self._find("optimizer", fallback)
        except MegaoptError as error:
            owner = self.owner("optimizer", optimizer)
            error.args = (f"{fallback!r} is the fallback of optimizer {optimizer!r} of {owner}: {error}",)
            raise

    @contextmanager
    def blaming(self, kind: Kind, name: str) -> Iterator[None]:
        """Name the plugin that offers something in whatever its code raises inside the block.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"` or `"precision"`.
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
        return {**self._installed.contents().settings, **self._resolved_settings}

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
        for plugin in self._installed.contents().plugins:
            try:
                found += [(plugin.info, result) for result in _call(plugin, hook_name, kwargs)]
            except PluginHookError as error:
                if failed is None:
                    raise
                failed.append(error)
        return found

    def _all(self, kind: Kind) -> dict[str, Any]:
        return {name: offered for name, (offered, _) in self._installed.contents().tables[kind].items()}

    def _find(self, kind: Kind, name: str) -> tuple[Any, PluginInfo]:
        """Return what has a name, and whose it is."""
        contents = self._installed.contents()
        contents.require_one_owner(kind, name)
        found = contents.tables[kind].get(name)
        if found is None and kind == "optimizer":
            found = self._resolve(contents, name)
        if found is None:
            raise missing(kind, name, tuple(contents.tables[kind]), self._installed.infos)
        return found

    def _resolve(self, contents: Contents, name: str) -> tuple[OptimizerEntry, PluginInfo] | None:
        from megaopt_core.registry._contents import resolve_optimizer
        from megaopt_core.registry._loading import check_entry
        from megaopt_core.registry._setting_owners import find_owners

        with self._installed.lock:
            if name in self._resolved:
                return self._resolved[name]
            found = resolve_optimizer(name, contents.plugins)
            if found is not None:
                resolved = {**self._resolved, name: found}
                owned = {**contents.tables["optimizer"], **resolved}
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


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.OutOfMemoryError)


def _call(plugin: LoadedPlugin, hook_name: str, kwargs: Mapping[str, Any]) -> list[Any]:
    given = {name: _own(name, value) for name, value in kwargs.items()}
    try:
        with warnings.catch_warnings():  # filters that it sets are its own affair
            return list(getattr(plugin.hooks, hook_name)(**given))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise plugin.info.failed_in(hook_name, words_of(error)) from error


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
