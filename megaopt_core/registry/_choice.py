"""Which plugins the environment lets in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from attrs import evolve

from megaopt_core.registry._infos import PluginInfo, PluginStatus

__all__ = ["ALLOW", "DISABLE", "chosen", "named_in_vain"]

DISABLE = "MEGAOPT_DISABLE_PLUGINS"
"""Environment variable: the plugins named here, separated by commas, are left out."""

ALLOW = "MEGAOPT_PLUGINS"
"""Environment variable: only the plugins named here are let in; empty means none but the core's own."""


def chosen(info: PluginInfo, environ: Mapping[str, str]) -> PluginInfo:
    """Return what is known of a plugin, with status blocked and the reason where the environment leaves it out.

    Args:
        info: a plugin; the variables may name it by its entry point or by its distribution.
        environ: `os.environ`, or a stand-in.

    Example:
        >>> chosen(PluginInfo("b", "b.plugin", "megaopt-b"), {"MEGAOPT_DISABLE_PLUGINS": "a, megaopt-b"}).error
        'MEGAOPT_DISABLE_PLUGINS=a,megaopt-b blocks it'
    """
    for variable, does in ((DISABLE, "blocks it"), (ALLOW, "leaves it out")):
        if info.is_core or variable not in environ:
            continue
        names = _names(environ[variable])
        if any(map(info.goes_by, names)) is (variable == DISABLE):
            return evolve(info, status=PluginStatus.BLOCKED, error=f"{variable}={','.join(names)} {does}")
    return info


def named_in_vain(plugins: Collection[PluginInfo], environ: Mapping[str, str]) -> list[str]:
    """Return a line for every name in the two variables that no installed plugin goes by, such as a misspelt one.

    Args:
        plugins: every installed plugin.
        environ: `os.environ`, or a stand-in.
    """
    return [
        f"{variable} names {name!r}, and no installed plugin goes by that"
        for variable in (DISABLE, ALLOW)
        for name in _names(environ.get(variable, ""))
        if not any(info.goes_by(name) for info in plugins)
    ]


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
