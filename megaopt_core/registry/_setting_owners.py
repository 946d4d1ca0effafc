"""Which plugin owns which setting of the configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
from attrs import Attribute, frozen

from megaopt_core.errors import DuplicateNameError
from megaopt_core.plugin_api._entries import OptimizerEntry
from megaopt_core.registry._infos import PluginInfo

__all__ = ["SettingInfo", "find_owners", "type_name"]


@frozen
class SettingInfo:
    """One setting that a plugin adds to the configuration.

    Args:
        name: full name, `{prefix}_{field}`.
        prefix: the entry's first setting prefix.
        field: the attrs attribute of the settings class.
        settings: the settings class.
        plugin: whose it is.
        entry: name of the optimizer whose entry brings it.
    """

    name: str
    prefix: str
    field: Attribute[Any]
    settings: type
    plugin: PluginInfo
    entry: str

    @property
    def default(self) -> Any:
        """The value of a configuration that does not set it."""
        default = self.field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            return getattr(self.settings(), self.field.name)
        return default

    @property
    def type(self) -> str:
        """The annotated type, in words."""
        return type_name(self.field.type)

    @property
    def help(self) -> str:
        """What it does, from `metadata={"help": ...}`."""
        return str(self.field.metadata.get("help", ""))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that can be chosen, from `metadata={"choices": ...}`: strings, or a function that finds them."""
        found = self.field.metadata.get("choices", ())
        return tuple(map(str, found() if callable(found) else found))


def find_owners(
    offered: Iterable[tuple[str, OptimizerEntry, PluginInfo]],
) -> tuple[dict[str, SettingInfo], dict[str, DuplicateNameError]]:
    """Return the owner of every setting by full name, and the error for every full name that has two.

    Args:
        offered: name, entry and plugin of every optimizer. Entries of one plugin may share a settings class.
    """
    owners: dict[str, SettingInfo] = {}
    contested: dict[str, DuplicateNameError] = {}
    for entry_name, entry, plugin in offered:
        if entry.settings is None:
            continue
        prefix = entry.setting_prefixes[0]
        for setting in attrs.fields(entry.settings):
            info = SettingInfo(
                f"{prefix}_{setting.name}", prefix, setting, entry.settings, plugin, entry_name
            )
            first = owners.setdefault(info.name, info)
            if first.settings is not info.settings or first.plugin != info.plugin:
                contested.setdefault(info.name, _contested(first, info))
    return {name: info for name, info in owners.items() if name not in contested}, contested


def _contested(first: SettingInfo, second: SettingInfo) -> DuplicateNameError:
    return DuplicateNameError(
        f"setting {second.name!r} is given by {first.plugin} for optimizer {first.entry!r} and by "
        f"{second.plugin} for optimizer {second.entry!r}; each needs a setting prefix of its own",
        name=second.name,
        owners=(first.plugin.source, second.plugin.source),
    )


def type_name(annotation: Any) -> str:
    """Return an annotation as a person would write it.

    Args:
        annotation: a type, a string or None.

    Example:
        >>> type_name(float), type_name("float | None"), type_name(tuple[int, ...])
        ('float', 'float | None', 'tuple[int, ...]')
    """
    if annotation is None:
        return ""
    if isinstance(annotation, str):
        return annotation
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
