"""Finding, loading, isolating and looking up plugins, and what their constructors are given."""

from megaopt_core.registry._choice import ALLOW, DISABLE
from megaopt_core.registry._constructor import constructor_kwargs
from megaopt_core.registry._loading import LoadedPlugin, PluginInfo, PluginStatus
from megaopt_core.registry._registry import GROUP, PluginRegistry, get_registry, reset_registry
from megaopt_core.registry._setting_owners import SettingInfo

__all__ = [
    "ALLOW",
    "DISABLE",
    "GROUP",
    "LoadedPlugin",
    "PluginInfo",
    "PluginRegistry",
    "PluginStatus",
    "SettingInfo",
    "constructor_kwargs",
    "get_registry",
    "reset_registry",
]
