"""Which plugins the environment lets in."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from megaopt_core.registry._infos import PluginInfo, PluginStatus

__all__ = ["ALLOW", "DISABLE", "chosen"]

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
        names = [name.strip() for name in environ[variable].split(",") if name.strip()]
        if any(map(info.goes_by, names)) is (variable == DISABLE):
            return evolve(info, status=PluginStatus.BLOCKED, error=f"{variable}={','.join(names)} {does}")
    return info
