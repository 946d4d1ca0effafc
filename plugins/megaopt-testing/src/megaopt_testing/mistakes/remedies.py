"""What to write instead, for errors that Python raises in a plugin's own words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

import attrs

from megaopt_core.plugin_api import OptimizerEntry, ScheduleStyle, StoredParam, StoredRouting

__all__ = ["meant", "remedy_of"]

_RECORDS = {record.__name__: record for record in (OptimizerEntry, ScheduleStyle, StoredParam, StoredRouting)}

_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


def remedy_of(error: BaseException) -> str:
    """Return what to write instead of an argument that no record of the plugin API has; empty for any other error.

    Args:
        error: what a plugin raised.

    Example:
        >>> remedy_of(TypeError("OptimizerEntry.__init__() got an unexpected keyword argument 'granularty'"))
        "; did you mean 'granularity'?"
        >>> remedy_of(ValueError("no such device"))
        ''
    """
    # The words of anything else may be anybody's code.
    words = error.args[0] if type(error) is TypeError and len(error.args) == 1 else None
    found = _UNEXPECTED.fullmatch(words) if type(words) is str else None
    record = None if found is None else _RECORDS.get(found[1])
    if found is None or record is None:
        return ""
    names = [field.alias or field.name for field in attrs.fields(record)]
    return meant(found[2], names) or f"; it takes {', '.join(names)}"


def meant(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'a'?"`, empty when nothing is close.

    Args:
        name: what was written.
        known: what there is.

    Example:
        >>> meant("modl_chunks", ["config", "model_chunks"])
        "; did you mean 'model_chunks'?"
    """
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
