"""Plugins that are there for the duration of a test, without being installed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megaopt_core.errors import BrokenPluginWarning, PluginError
from megaopt_core.registry import ALLOW, GROUP, PluginRegistry, PluginStatus, get_registry, reset_registry

__all__ = ["temporary_plugin"]

_ACTIVE: list[EntryPoint] = []


class _ObjectEntryPoint(EntryPoint):
    """An entry point whose plugin exists already."""

    def __init__(self, name: str, plugin: Any) -> None:
        super().__init__(name=name, value=getattr(plugin, "__name__", type(plugin).__name__), group=GROUP)
        vars(self)["plugin"] = plugin

    def load(self) -> Any:
        """Return the plugin."""
        return vars(self)["plugin"]


def _environ_that_allows(name: str) -> dict[str, str]:
    """Return the environment, in which a list of allowed plugins names the temporary ones too."""
    if ALLOW not in os.environ:
        return dict(os.environ)
    return {**os.environ, ALLOW: ",".join([os.environ[ALLOW], *(point.name for point in _ACTIVE), name])}


@contextmanager
def temporary_plugin(plugin: Any, name: str = "temporary") -> Iterator[PluginRegistry]:
    """Register a plugin beside the installed ones for the time of a `with` block.

    Calls may be nested; `MEGAOPT_PLUGINS` does not keep it out. The plugin declares `megaopt_api = "1"`, as all plugins
    do.

    Args:
        plugin: a module or an object with hook implementations.
        name: the name of its entry point; no other plugin may have it.

    Yields:
        The registry that holds while the block runs.

    Raises:
        PluginError: the plugin cannot be loaded, or gives a name that another gives; the message says why.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from megaopt_core import OptimizerEntry, get_registry, hookimpl
        >>> class MyPlugin:
        ...     megaopt_api = "1"
        ...     @hookimpl
        ...     def megaopt_optimizer_entries(self):
        ...         return {"mine": OptimizerEntry(torch.optim.Adagrad)}
        >>> with temporary_plugin(MyPlugin()):
        ...     "mine" in get_registry().optimizers()
        True
        >>> "mine" in get_registry().optimizers()
        False
    """
    point = _ObjectEntryPoint(name, plugin)
    previous = get_registry()
    registry = PluginRegistry([*entry_points(group=GROUP), *_ACTIVE, point], _environ_that_allows(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BrokenPluginWarning)
        registry.load()
    (info,) = [info for info in registry.plugins() if info.name == name]
    if info.status is not PluginStatus.LOADED:
        raise PluginError(f"temporary {info} is {info.status.value}: {info.error}")
    for conflict in registry.conflicts():
        if info.source in conflict.owners:
            raise conflict
    _ACTIVE.append(point)
    reset_registry(registry)
    try:
        yield registry
    finally:
        _ACTIVE.remove(point)
        reset_registry(previous)
