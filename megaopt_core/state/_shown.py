"""How names are listed in errors and reports."""

from __future__ import annotations

__all__ = ["shown"]


def shown(names: tuple[str, ...] | list[str], most: int = 5) -> str:
    """Return the first names of a list, and how many more there are.

    Args:
        names: the names.
        most: how many to show.
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
