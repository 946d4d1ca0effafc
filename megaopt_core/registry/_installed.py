"""Which plugins are installed, in their one order, and which of them the environment leaves out; imports none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points

from attrs import evolve

from megaopt_core.registry._infos import CORE_MODULE, PluginInfo, PluginStatus

__all__ = ["ALLOW", "DISABLE", "GROUP", "choice_in", "installed", "may_implement", "named_in_vain"]

type Choice = Mapping[str, Sequence[str]]
"""Which of the two variables are set, and the names in each."""

GROUP = "megaopt"
"""The entry-point group in which plugins are found."""

DISABLE = "MEGAOPT_DISABLE_PLUGINS"
"""Environment variable: the plugins named here, separated by commas, are left out."""

ALLOW = "MEGAOPT_PLUGINS"
"""Environment variable: only the plugins named here are let in; empty means none but the core's own."""

_CORE = EntryPoint(name="core", value=CORE_MODULE, group=GROUP)
"""The core's own plugin, which is there even where the core runs without being installed."""


def choice_in(environ: Mapping[str, str]) -> Choice:
    """Return what the two variables name.

    Args:
        environ: where they are read from.
    """
    set_here = [variable for variable in (DISABLE, ALLOW) if variable in environ]
    return {each: [name.strip() for name in environ[each].split(",") if name.strip()] for each in set_here}


def installed(given: Iterable[EntryPoint] | None, choice: Choice) -> list[tuple[EntryPoint, PluginInfo]]:
    """Return entry points, the core's own first, the others by name, so that every rank has one order.

    Args:
        given: the entry points; None: those of group `megaopt` that are installed.
        choice: what the environment lets in.
    """
    points = entry_points(group=GROUP) if given is None else given
    # What a distribution says of itself is read from its files each time that it is asked.
    found = [(point, PluginInfo.of(point)) for point in points]
    core = [each for each in found if each[1].is_core] or [(_CORE, PluginInfo.of(_CORE))]
    others = [(point, _let_in(info, choice)) for point, info in found if not info.is_core]
    others.sort(key=lambda each: (each[1].name, each[1].distribution or "", each[1].module))
    return [core[0], *others]


def _let_in(info: PluginInfo, choice: Choice) -> PluginInfo:
    """Return what is known of a plugin, with status blocked and the reason where the environment leaves it out."""
    for variable, names in choice.items():
        blocks = variable == DISABLE
        if any(map(info.goes_by, names)) is blocks:
            does = "blocks it" if blocks else "leaves it out"
            return evolve(info, status=PluginStatus.BLOCKED, error=f"{variable}={','.join(names)} {does}")
    return info


def named_in_vain(choice: Choice, plugins: Sequence[PluginInfo]) -> list[str]:
    """Return a line for every name in the two variables that no installed plugin goes by.

    Args:
        choice: what they name.
        plugins: every installed plugin.
    """
    return [
        f"{variable} names {name!r}, and no installed plugin goes by that"
        for variable, names in choice.items()
        for name in names
        if not any(info.goes_by(name) for info in plugins)
    ]


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
