"""Finding, loading, isolating and looking up plugins; listing plugins needs no torch."""

from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus, contested
from megaopt_core.registry._installed import ALLOW, COMMANDS, DISABLE, GROUP
from megaopt_core.registry._loading import LoadedPlugin, hook_arguments
from megaopt_core.registry._missing import Kind, did_you_mean, import_distribution
from megaopt_core.registry._registry import PluginRegistry, get_registry, reset_registry
from megaopt_core.registry._setting_owners import SettingInfo, type_name

__all__ = [
    "ALLOW",
    "COMMANDS",
    "DISABLE",
    "GROUP",
    "Kind",
    "LoadedPlugin",
    "PluginInfo",
    "PluginRegistry",
    "PluginStatus",
    "SettingInfo",
    "contested",
    "did_you_mean",
    "get_registry",
    "hook_arguments",
    "import_distribution",
    "reset_registry",
    "type_name",
    "words_of",
]
