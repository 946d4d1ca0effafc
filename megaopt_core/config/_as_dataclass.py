"""What the standard library's `dataclasses` asks of a configuration, which is none: settings come from plugins too."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from megaopt_core.config._fields import core_field_info

__all__ = ["DataclassFields", "DataclassParams"]


@cache
def _core_fields() -> dict[str, dataclasses.Field[Any]]:
    fields = [(info.name, info.type, dataclasses.field(default=info.default)) for info in core_field_info()]
    return _fields_of(dataclasses.make_dataclass("Core", fields, kw_only=True))


def _fields_of(made: Any) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(made)}


class DataclassFields:
    """`__dataclass_fields__`: the core's fields of the class; of a configuration also the plugin settings it was given.

    So `dataclasses.fields`, `replace` and `asdict` see what there is.
    """

    def __get__(self, config: Any, owner: type) -> dict[str, dataclasses.Field[Any]]:
        """Return the fields by name."""
        given = [] if config is None else [(name, Any) for name in config.plugin_settings]
        return {**_core_fields(), **_fields_of(dataclasses.make_dataclass("Given", given, kw_only=True))}


class DataclassParams:
    """`__dataclass_params__`, as far as printers look at it: a configuration has a `repr` of its own."""

    repr = False
