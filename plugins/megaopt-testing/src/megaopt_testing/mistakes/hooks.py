"""What hooks take, which is what megaopt gives them or less."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import pluggy

from megaopt_core.errors import PluginError
from megaopt_testing.mistakes.remedies import meant

__all__ = ["check_hooks"]


def check_hooks(plugin: Any, given: Mapping[str, Sequence[str]]) -> None:
    """Raise unless every hook of a plugin can be called with what it is given.

    Args:
        plugin: what its entry point names.
        given: hook to the arguments that it is given.

    Raises:
        PluginError: one takes something else.
    """
    for attribute, value in inspect.getmembers(plugin, inspect.isroutine):
        marks = getattr(value, "megaopt_impl", None)
        hook = attribute if marks is None else marks.get("specname") or attribute
        if marks is None or hook not in given:
            continue
        allowed = given[hook]
        impl = pluggy.HookImpl(plugin, "", value, marks)
        unknown = [name for name in impl.argnames if name not in allowed]
        if unknown:
            raise PluginError(
                f"its {attribute!r} takes {', '.join(map(repr, unknown))}, which the hook is not given; it may take "
                f"{', '.join(allowed) or 'no arguments'}{meant(unknown[0], allowed)}"
            )
