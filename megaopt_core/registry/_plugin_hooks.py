"""A plugin's module and the hooks in it: imported and checked, but not asked for anything yet.

Nothing here needs torch: the command line asks plugins for their commands through it, and answers at once.
"""

from __future__ import annotations

import inspect
import sys
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from megaopt_core.errors import PluginError
from megaopt_core.plugin_api import _hookspecs as hookspecs
from megaopt_core.registry._infos import PluginInfo
from megaopt_core.registry._missing import did_you_mean

__all__ = ["API_VERSION", "import_plugin", "may_implement"]

API_VERSION = "1"
"""The `megaopt_api` that a plugin has to declare."""

_HOOKS = tuple(name for name in hookspecs.__all__ if name.startswith("megaopt_"))


def import_plugin(point: EntryPoint, info: PluginInfo) -> tuple[Any, pluggy.HookRelay]:
    """Import a plugin and check its version and the names of its hooks.

    Args:
        point: its entry point.
        info: what is known about it.

    Returns:
        What the entry point names, and the hooks that it implements.

    Raises:
        PluginError: it is made for another megaopt, or a hook of it is not what it looks like.
        BaseException: whatever its entry point or its module raises.
    """
    plugin = point.load()
    _check_api(plugin)
    return plugin, _register_alone(info.name, plugin).hook


def may_implement(point: EntryPoint, hook: str) -> bool:
    """Return whether a plugin may implement a hook, by the words of its source; imports nothing.

    Args:
        point: its entry point.
        hook: the hook's name.

    Returns:
        False only where the module can be read, and neither names the hook nor takes names from elsewhere unnamed.
    """
    if type(point) is not EntryPoint or not point.value.replace(".", "").isidentifier():
        return True  # what else may be loaded, and how, is not ours to say
    source = _source_of(point.value)
    return source is None or hook in source or "import *" in source


def _source_of(module: str) -> str | None:
    """Return the source of a module without importing it or its packages; None where there is none to read."""
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = module.split(".")
    try:
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            spec = next(filter(None, (finder.find_spec(name, path) for finder in sys.meta_path)), None)
            if spec is None:
                return None
            path = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
        source = spec.loader.get_source(module) if spec and isinstance(spec.loader, InspectLoader) else None
    except Exception:  # noqa: BLE001 - finders and loaders are anybody's; who cannot be read is imported
        return None
    return source


def _check_api(plugin: Any) -> None:
    """Raise for a plugin of another megaopt; the error says who is older, and what to upgrade."""
    declared = getattr(plugin, "megaopt_api", None)
    if declared is None:
        raise PluginError(
            f'it declares no megaopt_api; plugins for this megaopt declare megaopt_api = "{API_VERSION}"'
        )
    if declared == API_VERSION:
        return
    if not (isinstance(declared, str) and declared.isdecimal()):
        advice = "declare it as that text"
    elif int(declared) > int(API_VERSION):
        advice = "the plugin is written for a newer megaopt; upgrade megaopt-core, or take an older plugin"
    else:
        advice = "the plugin is written for an older megaopt; upgrade the plugin"
    raise PluginError(
        f"it declares megaopt_api = {declared!r}, and this megaopt loads plugins that declare {API_VERSION!r}: {advice}"
    )


def _register_alone(name: str, plugin: Any) -> pluggy.PluginManager:
    """Register a plugin in a manager of its own, where hooks show that would silently do nothing."""
    for attribute, value in inspect.getmembers(plugin, inspect.isroutine):
        if attribute.startswith("megaopt_") and not hasattr(value, "megaopt_impl"):
            raise PluginError(f"its function {attribute!r} is not marked with @hookimpl{_meant(attribute)}")
    for known in _HOOKS:
        hook = getattr(plugin, known, None)
        if hook is not None and not inspect.isroutine(hook):
            raise PluginError(f"its {known!r} is no function but of type {type(hook).__name__}")
    manager = pluggy.PluginManager("megaopt")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=name)
    for caller in manager.get_hookcallers(plugin) or ():
        for impl in caller.get_hookimpls():
            if not caller.has_spec() and not impl.optionalhook:
                raise PluginError(f"it implements {caller.name!r}, which is no hook{_meant(caller.name)}")
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(f"its {caller.name!r} is a wrapper; megaopt calls every plugin by itself")
            _require_no_default(caller, impl)
    return manager


def _require_no_default(caller: pluggy.HookCaller, impl: pluggy.HookImpl) -> None:
    """Raise where a hook gives a default to what it would be given: pluggy hands over what has none, and only that."""
    given = caller.spec.argnames if caller.spec is not None else ()
    wrong = [name for name in impl.kwargnames if name in given]
    if wrong:
        raise PluginError(
            f"its {caller.name!r} would never be given {', '.join(map(repr, wrong))}, which has a default: pluggy "
            "hands over arguments without one; remove the default"
        )


def _meant(name: str) -> str:
    return "" if name in _HOOKS else did_you_mean(name, _HOOKS)
