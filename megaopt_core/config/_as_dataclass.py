"""What the standard library's `dataclasses` asks of a configuration, which is none: settings come from plugins too."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from megaopt_core.config._fields import core_field_info
from megaopt_core.registry._registry import get_registry

__all__ = ["DataclassFields", "DataclassParams"]


@cache
def _core_fields() -> dict[str, dataclasses.Field[Any]]:
    fields = [(info.name, info.type, dataclasses.field(default=info.default)) for info in core_field_info()]
    return _fields_of(dataclasses.make_dataclass("Core", fields, kw_only=True))


def _fields_of(made: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(made)}


def _plugin_field(default: Any) -> Any:
    if type(default).__hash__ is None:
        return dataclasses.field(default_factory=lambda: default)
    return dataclasses.field(default=default)


class DataclassFields:
    """`__dataclass_fields__`: of the class, the core's fields and the settings of installed plugins.

    Of a configuration, the core's fields and the plugin settings that it was given. So `dataclasses.fields`, `replace`
    and `asdict` see what there is, and a trainer that fills a configuration from its arguments leaves none out.
    """

    def __get__(self, config: Any, owner: type) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields by name."""
        if config is None:
            owned = get_registry().setting_owners().items()
            plugin = [(name, info.field.type or Any, _plugin_field(info.default)) for name, info in owned]
        else:
            plugin = [(name, Any, dataclasses.field()) for name in config.plugin_settings]
        return {**_core_fields(), **_fields_of(dataclasses.make_dataclass("Given", plugin, kw_only=True))}


class DataclassParams:
    """`__dataclass_params__`, as far as printers look at it: a configuration has a `repr` of its own."""

    repr = False
