"""Finding, loading, isolating and looking up plugins, and what their constructors are given.

Names whose modules need torch are imported when they are first used: listing plugins needs none.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily
from megaopt_core.registry._infos import PluginInfo, PluginStatus
from megaopt_core.registry._installation import ALLOW, DISABLE, GROUP
from megaopt_core.registry._registry import PluginRegistry, get_registry, reset_registry

if TYPE_CHECKING:
    from megaopt_core.registry._constructor import constructor_kwargs
    from megaopt_core.registry._loading import LoadedPlugin
    from megaopt_core.registry._missing import Kind
    from megaopt_core.registry._setting_owners import SettingInfo

__all__ = [
    "ALLOW",
    "DISABLE",
    "GROUP",
    "Kind",
    "LoadedPlugin",
    "PluginInfo",
    "PluginRegistry",
    "PluginStatus",
    "SettingInfo",
    "constructor_kwargs",
    "get_registry",
    "reset_registry",
]

_HOME = {
    "Kind": "_missing",
    "LoadedPlugin": "_loading",
    "SettingInfo": "_setting_owners",
    "constructor_kwargs": "_constructor",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
