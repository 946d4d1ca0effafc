"""One plugin: imported by itself, checked, and called, but not asked yet for what it offers.

Nothing here needs torch: the command line asks plugins for their commands through it, and answers at once.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import pluggy
from attrs import field, frozen

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import _hookspecs as hookspecs
from megaopt_core.registry._faults import loading, words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._installed import brings_commands
from megaopt_core.registry._missing import did_you_mean

if TYPE_CHECKING:
    from megaopt_core.registry._offers import Offers

__all__ = ["API_VERSION", "LoadedPlugin", "hook_arguments", "import_each"]

API_VERSION = "1"
"""The `megaopt_api` that a plugin has to declare."""

_HOOKS = tuple(name for name in hookspecs.__all__ if name.startswith("megaopt_"))


@frozen(eq=False)
class LoadedPlugin:
    """A plugin that works.

    Args:
        info: who it is.
        implementation: the module or object that its entry point names.
        hooks: the functions that implement each of its hooks.
        offers: kind to name to what it offers; empty while it has not been asked.
    """

    info: PluginInfo
    implementation: Any
    hooks: Mapping[str, Sequence[pluggy.HookImpl]]
    offers: Mapping[str, Mapping[str, Any]] = field(factory=dict)

    def has(self, hook: str) -> bool:
        """Return whether the plugin implements a hook.

        Args:
            hook: the hook's name.
        """
        return hook in self.hooks

    def ask(self, hook: str, /, **arguments: Any) -> list[Any]:
        """Call a hook. A configuration among the arguments is copied: what the plugin changes, no other sees.

        Args:
            hook: its name.
            **arguments: all its arguments.

        Returns:
            The answer of every implementation that is not None.

        Raises:
            BaseException: whatever the plugin raises.
        """
        if hook not in self.hooks:
            return []
        given = {name: _own(name, value) for name, value in arguments.items()}
        answers = []
        for impl in self.hooks[hook]:
            # pluggy by itself leaves out those that have a default in the plugin
            by_name = {name: given[name] for name in impl.kwargnames if name in given}
            with warnings.catch_warnings():  # filters that it sets are its own affair
                answers.append(impl.function(*(given[name] for name in impl.argnames), **by_name))
        return [answer for answer in answers if answer is not None]

    def call(self, hook: str, /, **arguments: Any) -> list[Any]:
        """Return what :meth:`ask` does, and name the plugin in an error.

        Args:
            hook: the hook's name.
            **arguments: all its arguments.

        Raises:
            PluginHookError: the plugin raised; the message names it, and the error is the cause.
        """
        try:
            return self.ask(hook, **arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise self.info.failed_in(hook, words_of(error)) from error


def _own(name: str, value: Any) -> Any:
    """Return what a plugin may change as it likes; the models are what they are."""
    if name == "config":
        return copy.deepcopy(value)
    return list(value) if name == "model_chunks" else value


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """Return the arguments that each hook is given, by its name."""
    hooks = vars(_new_manager().hook)
    return {name: tuple(hooks[name].spec.argnames) for name in _HOOKS}


def _new_manager() -> pluggy.PluginManager:
    """Return a manager that knows every hook, and no plugin."""
    manager = pluggy.PluginManager("megaopt")
    manager.add_hookspecs(hookspecs)
    return manager


type Found = list[tuple[EntryPoint, PluginInfo]]


def import_each(
    installed: Found, offers: Offers | None
) -> tuple[Found, list[LoadedPlugin], list[PluginInfo]]:
    """Import plugins one by one, and ask each what it offers; whatever one does wrong stays with it.

    Args:
        installed: the plugins in their one order; those that are blocked or broken are passed over.
        offers: gets what they offer; None: only those are imported that bring commands, and not asked.

    Returns:
        The plugins with what became of each, those that work, and those that are broken from now on.

    Raises:
        KeyboardInterrupt: somebody has pressed the keys; nothing is known then that was not known before.
    """
    manager, found = _new_manager(), list(installed)
    works: list[LoadedPlugin] = []
    broken: list[PluginInfo] = []
    for index, (point, info) in enumerate(found):
        is_wanted = offers is not None or brings_commands(point)
        if info.status is not PluginStatus.AVAILABLE or not is_wanted:
            continue
        try:
            with loading(str(info), info.name):
                plugin = _import_plugin(point, info, manager)
                works.append(plugin if offers is None else offers.add(plugin))
            found[index] = point, works[-1].info
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin may fail in any way, and takes no other down
            broken.append(info.broken_by(error))
            found[index] = point, broken[-1]
    return found, works, broken


def _import_plugin(point: EntryPoint, info: PluginInfo, manager: pluggy.PluginManager) -> LoadedPlugin:
    """Import a plugin, and register it where its version and the names of its hooks are right."""
    plugin = point.load()
    _check_api(plugin)
    _check_functions(plugin)
    manager.register(plugin, str(info) if manager.has_plugin(info.name) else info.name)
    hooks = {}
    for caller in manager.get_hookcallers(plugin) or ():
        hooks[caller.name] = [impl for impl in caller.get_hookimpls() if impl.plugin is plugin]
        for impl in hooks[caller.name]:
            if not (caller.has_spec() or impl.optionalhook):
                raise PluginError(f"it implements {caller.name!r}, which is no hook{_meant(caller.name)}")
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(f"its {caller.name!r} is a wrapper; megaopt calls every plugin by itself")
    return LoadedPlugin(info, plugin, hooks)


def _check_api(plugin: Any) -> None:
    """Raise for a plugin of another megaopt; the error says who is older, and what to upgrade."""
    declared = getattr(plugin, "megaopt_api", None)
    if declared == API_VERSION:
        return
    if declared is None:
        raise PluginError(
            f'it declares no megaopt_api; plugins for this megaopt declare megaopt_api = "{API_VERSION}"'
        )
    if not (isinstance(declared, str) and declared.isdecimal()):
        advice = "declare it as that text"
    elif int(declared) > int(API_VERSION):
        advice = "the plugin is written for a newer megaopt; upgrade megaopt-core, or take an older plugin"
    else:
        advice = "the plugin is written for an older megaopt; upgrade the plugin"
    raise PluginError(
        f"it declares megaopt_api = {declared!r}, and this megaopt loads plugins that declare {API_VERSION!r}: {advice}"
    )


def _check_functions(plugin: Any) -> None:
    """Raise where a hook would silently do nothing, since pluggy does not take it for one."""
    for attribute, value in inspect.getmembers(plugin):
        is_function = inspect.isroutine(value)
        if attribute.startswith("megaopt_") and is_function and not hasattr(value, "megaopt_impl"):
            raise PluginError(f"its function {attribute!r} is not marked with @hookimpl{_meant(attribute)}")
        if attribute in _HOOKS and not is_function:
            raise PluginError(f"its {attribute!r} is no function but of type {type(value).__name__}")


def _meant(name: str) -> str:
    return "" if name in _HOOKS else did_you_mean(name, _HOOKS)
