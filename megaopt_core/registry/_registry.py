"""The registry: which plugins are installed, and what they offer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, Literal

from megaopt_core.errors import (
    BrokenPluginWarning,
    DuplicateNameError,
    MegaoptError,
    PluginError,
    PluginHookError,
    warn_user,
)
from megaopt_core.registry import _missing as missing
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._installed import choice_in, installed, named_in_vain
from megaopt_core.registry._loading import LoadedPlugin, import_each
from megaopt_core.registry._missing import Kind

if TYPE_CHECKING:  # what plugins offer needs torch; listing plugins and their commands does not
    from megaopt_core.plugin_api._entries import OptimizerEntry
    from megaopt_core.plugin_api._schedule_style import ScheduleStyle
    from megaopt_core.registry._offers import Offers
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
        self._choice = choice_in(os.environ if environ is None else environ)
        self._installed = installed(entry_points, self._choice)
        self._offers: Offers | None = None
        self._lock = threading.RLock()
        self._is_loading = False

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Return every installed plugin, the core's own first, then by name; imports none."""
        return tuple(info for _, info in self._installed)

    def named_in_vain(self) -> list[str]:
        """Return a line for every name in the two variables that no installed plugin goes by."""
        return named_in_vain(self._choice, self.plugins())

    def load(self) -> None:
        """Load every plugin that is not blocked, once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        self._loaded()

    def loaded_plugins(self) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that have been loaded and work, with what each offers; loads none."""
        return () if self._offers is None else tuple(self._offers.plugins)

    def command_plugins(self) -> tuple[LoadedPlugin, ...]:
        """Return the plugins that bring commands.

        Before the plugins are loaded, only those are imported that group `megaopt.commands` of entry points names too,
        and none is asked for anything else: a plugin whose module does not import torch shows its commands at once.

        Raises:
            PluginError: a plugin asked for this while it was being loaded itself.
        """
        with self._lock:
            if self._offers is not None:
                plugins = self._offers.plugins
            else:
                plugins, broken = self._import_each(None)
                _warn_of(broken)
            return tuple(plugin for plugin in plugins if plugin.has("megaopt_commands"))

    def _loaded(self) -> Offers:
        """Return what all plugins together offer; the first call loads them."""
        with self._lock:
            if self._offers is None:
                from megaopt_core.registry._offers import Offers

                offers = Offers()
                _, broken = self._import_each(offers)
                self._offers = offers
                _warn_of(broken)
            return self._offers

    def _import_each(self, offers: Offers | None) -> tuple[list[LoadedPlugin], list[PluginInfo]]:
        """Return the plugins that work, and those that are broken from now on."""
        if self._is_loading:
            raise PluginError(
                "plugins are being loaded: a plugin must not look others up while it is imported"
            )
        self._is_loading = True
        try:
            self._installed, works, broken = import_each(self._installed, offers)
        finally:
            self._is_loading = False
        return works, broken

    def conflicts(self) -> tuple[DuplicateNameError, ...]:
        """Return an error for every name that two plugins give."""
        return tuple(self._loaded().conflicts.values())

    def require_one_owner(self, kind: str, name: str) -> None:
        """Raise if two plugins give a name.

        Args:
            kind: `"optimizer"`, `"strategy"`, `"schedule"`, `"precision"`, `"setting"` or `"plugin"`.
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
        entry: OptimizerEntry = self._find("optimizer", name)[0]
        return entry

    def has_optimizer(self, name: str, *, listed: bool = False) -> bool:
        """Return whether an optimizer can be had here, listed or resolved.

        Args:
            name: what users write in `optimizer="..."`.
            listed: a plugin must list it: names from files are looked up so, for to resolve one may import a module.
        """
        if listed:
            return name in self._loaded().table["optimizer"]
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
        style: ScheduleStyle = self._find("schedule", name, tuple(self.schedules(kind)))[0]
        return style

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
            import torch

            owner = self.owner(kind, name)
            if owner.is_core or isinstance(error, torch.OutOfMemoryError):
                raise
            raise PluginError(f"{kind} {name!r} of {owner} failed: {words_of(error)}") from error

    def setting_owners(self) -> dict[str, SettingInfo]:
        """Return every setting that one plugin adds to the configuration, by its full name.

        Those of a resolved optimizer are among them once it has been asked for.
        """
        return self._all("setting")

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
        return self._loaded().call_each(hook_name, failed, kwargs)

    def absent_plugin(self, what: str, name: str, distribution: str) -> PluginError | None:
        """Return the error for something whose distribution is known, None if that distribution's plugin is loaded.

        Args:
            what: what was asked for, in words.
            name: its name.
            distribution: what brings it.
        """
        return missing.absent_plugin(what, name, distribution, self.plugins())

    def advice_on(
        self,
        name: str,
        known: Iterable[str],
        optimizer: str | None = None,
        *,
        kind: Literal["setting", "override", "argument"] = "setting",
    ) -> str:
        """Return what to write in place of a name that there is not, as the end of a sentence; empty without a guess.

        Args:
            name: what was given.
            known: the names that there are.
            optimizer: the optimizer that it was meant for, where it is known.
            kind: what the name was given as.

        Example:
            >>> PluginRegistry(entry_points=[], environ={}).advice_on("weigth_decay", ["lr", "weight_decay"])
            "; did you mean 'weight_decay'?"
        """
        known = list(known)
        advised = self.call_each(
            "megaopt_advice", failed=[], name=name, known=known, optimizer=optimizer, kind=kind
        )
        words = (advice for _, advice in advised if isinstance(advice, str))
        return next(words, missing.did_you_mean(name, known))

    def may_provide(self) -> str:
        """Return a sentence about the plugins that are installed and broken; empty when there are none."""
        return missing.may_provide(self.plugins())

    def _all(self, kind: str) -> dict[str, Any]:
        return {name: value for name, (value, _) in self._loaded().table[kind].items()}

    def _find(self, kind: Kind, name: str, among: Sequence[str] | None = None) -> tuple[Any, PluginInfo]:
        """Return what has a name, and whose it is."""
        self.require_one_owner(kind, name)
        offered = self._loaded().table[kind]
        known = tuple(offered) if among is None else among
        found = offered.get(name) if name in known else None
        if found is None and kind == "optimizer":
            with self._lock:
                found = self._loaded().resolved(name)
        if found is None:
            raise missing.missing(kind, name, known, self.plugins())
        return found


def _warn_of(broken: Iterable[PluginInfo]) -> None:
    for info in broken:
        warn_user(f"{info} failed to load and is left out: {info.error}", BrokenPluginWarning)


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
