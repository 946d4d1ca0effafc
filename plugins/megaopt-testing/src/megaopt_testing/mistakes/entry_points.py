"""What the line of an entry point asks for in vain."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Any

from megaopt_core.errors import PluginError

__all__ = ["load_named"]


def load_named(point: EntryPoint) -> Any:
    """Return what an entry point names.

    Args:
        point: the entry point.

    Raises:
        PluginError: it is malformed, or names nothing.
        BaseException: whatever its module raises.
    """
    line = f"its entry point `{point.name} = {point.value}`"
    if _is_malformed(point):
        raise PluginError(f"{line} is malformed; it must read `name = module` or `name = module:object`")
    try:
        return point.load()
    except ModuleNotFoundError as error:
        if error.name and f"{point.module}.".startswith(f"{error.name}."):
            raise PluginError(f"{line} asks for module {error.name!r}, which does not exist") from error
        raise
    except AttributeError as error:
        # A module whose import has failed is not kept: what is missing is the object.
        if point.attr and point.module in sys.modules:
            raise PluginError(
                f"{line} asks for {point.attr!r} of module {point.module!r}, which does not have it"
            ) from error
        raise


def _is_malformed(point: EntryPoint) -> bool:
    try:
        return not point.module
    except (AssertionError, AttributeError, ValueError):  # which of them depends on the version of Python
        return True
