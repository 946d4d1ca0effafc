"""Finding, loading, isolating and looking up plugins.

Names whose modules need torch are imported when they are first used: listing plugins needs none.
"""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily
from megaopt_core.registry._faults import words_of
from megaopt_core.registry._infos import PluginInfo, PluginStatus, contested
from megaopt_core.registry._installation import ALLOW, DISABLE, GROUP
from megaopt_core.registry._registry import PluginRegistry, get_registry, reset_registry

if TYPE_CHECKING:
    from megaopt_core.registry._loading import LoadedPlugin
    from megaopt_core.registry._missing import Kind, absent_plugin, did_you_mean, import_distribution
    from megaopt_core.registry._setting_owners import SettingInfo, type_name

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
    "absent_plugin",
    "contested",
    "did_you_mean",
    "get_registry",
    "import_distribution",
    "reset_registry",
    "type_name",
    "words_of",
]

_HOME = {
    "Kind": "_missing",
    "LoadedPlugin": "_loading",
    "SettingInfo": "_setting_owners",
    "absent_plugin": "_missing",
    "did_you_mean": "_missing",
    "import_distribution": "_missing",
    "type_name": "_setting_owners",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
