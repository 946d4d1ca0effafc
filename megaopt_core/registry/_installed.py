"""Which plugins are installed, in their one order, and which of them the environment leaves out; imports none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points

from attrs import evolve

from megaopt_core.registry._infos import CORE_MODULE, PluginInfo, PluginStatus

__all__ = [
    "ALLOW",
    "COMMANDS",
    "DISABLE",
    "GROUP",
    "brings_commands",
    "choice_in",
    "installed",
    "named_in_vain",
]

type Choice = Mapping[str, Sequence[str]]
"""Which of the two variables are set, and the names in each."""

GROUP = "megaopt"
"""The entry-point group in which plugins are found."""

COMMANDS = "megaopt.commands"
"""The entry-point group that names those plugins again that bring commands."""

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
    # A distribution reads its files each time that it is asked for its name or version.
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


def brings_commands(point: EntryPoint) -> bool:
    """Return whether a plugin says that it brings commands, in which case its distribution names it twice.

    Args:
        point: its entry point; one that is made by hand need say nothing.
    """
    if point.dist is None:
        return point.value != CORE_MODULE
    return any((each.group, each.name) == (COMMANDS, point.name) for each in point.dist.entry_points)
