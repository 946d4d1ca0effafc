"""Arguments of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["argument"]


def argument(position: int, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return an argument of a call, by position or by keyword; None where it is not given."""
    return args[position] if len(args) > position else kwargs.get(name)
