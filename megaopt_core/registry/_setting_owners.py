"""Which plugin owns which setting of the configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import Attribute, frozen

from megaopt_core.errors import DuplicateNameError
from megaopt_core.registry._infos import PluginInfo

if TYPE_CHECKING:
    from megaopt_core.plugin_api._entries import OptimizerEntry

__all__ = ["SettingInfo", "settings_in", "type_name"]


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

    def conflict_with(self, first: SettingInfo) -> DuplicateNameError | None:
        """Return the error for a name that another setting has; None where it is the same setting.

        Args:
            first: what has it.
        """
        if first.settings is self.settings and first.plugin == self.plugin:
            return None
        return DuplicateNameError(
            f"setting {self.name!r} is given by {first.plugin} for optimizer {first.entry!r} and by "
            f"{self.plugin} for optimizer {self.entry!r}; each needs a setting prefix of its own",
            name=self.name,
            owners=(first.plugin.source, self.plugin.source),
        )


def settings_in(name: str, entry: OptimizerEntry, plugin: PluginInfo) -> list[SettingInfo]:
    """Return the settings that an optimizer adds to the configuration.

    Args:
        name: the optimizer.
        entry: its entry; entries of one plugin may share a settings class.
        plugin: whose it is.
    """
    if entry.settings is None:
        return []
    prefix = entry.setting_prefixes[0]
    return [
        SettingInfo(f"{prefix}_{each.name}", prefix, each, entry.settings, plugin, name)
        for each in attrs.fields(entry.settings)
    ]


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
