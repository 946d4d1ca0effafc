"""Keeping the last checkpoints of a series."""

from __future__ import annotations

import re
from pathlib import Path

from megaopt_checkpoint.files import remove_tree
from megaopt_checkpoint.manifest import MANIFEST
from megaopt_core.errors import ConfigurationError

__all__ = ["remove_older", "require_numbered"]

_NUMBERED = re.compile(r"(?P<series>.*?)(?P<number>\d+)")


def require_numbered(path: Path, keep_last: int | None) -> None:
    """Raise unless a path can be one of a series.

    Args:
        path: where a checkpoint is saved.
        keep_last: how many of its series to keep; None: all.

    Raises:
        ConfigurationError: less than one is to be kept, or the name does not end with a number.
    """
    if keep_last is None:
        return
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1:
        raise ConfigurationError(
            f"keep_last={keep_last!r}: give a whole number of at least 1, or None to keep all",
            setting="keep_last",
            value=keep_last,
        )
    if not _NUMBERED.fullmatch(path.name):
        raise ConfigurationError(
            f"keep_last={keep_last} needs a path that ends with a number, like step-{1000}; got {path.name!r}",
            setting="keep_last",
            value=keep_last,
        )


def remove_older(path: Path, keep_last: int) -> list[Path]:
    """Remove the oldest checkpoints of the series that a path belongs to.

    Siblings whose names differ from the path's in the number at the end alone are one series; the number says the age.
    Folders without a manifest and links are left alone, and so is the path itself.

    Args:
        path: the newest checkpoint.
        keep_last: how many to keep, this one included.

    Returns:
        What was removed.
    """
    match = _NUMBERED.fullmatch(path.name)
    if match is None:
        return []
    series = []
    for sibling in path.parent.iterdir():
        other = _NUMBERED.fullmatch(sibling.name)
        if other is None or other["series"] != match["series"] or sibling == path or sibling.is_symlink():
            continue
        if (sibling / MANIFEST).is_file():
            series.append((int(other["number"]), sibling))
    series.sort()
    removed = [sibling for _, sibling in series[: max(len(series) - keep_last + 1, 0)]]
    for folder in removed:
        going = folder.with_name(f".{folder.name}.removing")
        remove_tree(going)
        folder.rename(going)  # one move: nobody finds half a checkpoint
        remove_tree(going)
    return removed
