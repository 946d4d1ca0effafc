"""Keeping the last checkpoints of a series."""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from attrs import define, field

from megaopt_checkpoint.files import remove_tree
from megaopt_checkpoint.manifest import MANIFEST
from megaopt_core.errors import CheckpointWarning, ConfigurationError

__all__ = ["Removal", "require_numbered"]

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
        raise ConfigurationError.of(
            "keep_last", keep_last, "give a whole number of at least 1, or None to keep all"
        )
    if not _NUMBERED.fullmatch(path.name):
        raise ConfigurationError(
            f"keep_last={keep_last} needs a path that ends with a number, like step-{1000}; got {path.name!r}",
            setting="keep_last",
            value=keep_last,
        )


@define
class Removal:
    """Removes the oldest checkpoints of a series after a new one is in place; what it cannot remove is warned of.

    Args:
        path: the newest checkpoint.
        keep_last: how many to keep, this one included; None: all.
        failures: what could not be removed, and why.
    """

    path: Path
    keep_last: int | None
    failures: dict[Path, str] = field(factory=dict)

    def run(self) -> None:
        """Remove what is too old; an error does not undo the save that has succeeded."""
        if self.keep_last is None:
            return
        try:
            older = _older(self.path)
        except OSError as error:
            self.failures[self.path.parent] = str(error)
            return
        for folder in older[: max(len(older) - self.keep_last + 1, 0)]:
            going = folder.with_name(f".{folder.name}.removing")
            try:
                remove_tree(going)
                folder.rename(going)  # one move: nobody finds half a checkpoint
                shutil.rmtree(going)
            except OSError as error:
                self.failures[folder] = error.strerror or str(error)

    def warn(self) -> None:
        """Say once what could not be removed."""
        failures, self.failures = self.failures, {}
        if failures:
            named = "; ".join(f"{folder}: {reason}" for folder, reason in failures.items())
            warnings.warn(
                f"{self.path} was saved, but older checkpoints could not be removed: {named}",
                CheckpointWarning,
                stacklevel=3,
            )


def _older(path: Path) -> list[Path]:
    """Return the checkpoints of the series that a path belongs to, without it, oldest first.

    Siblings whose names differ from the path's in the number at the end alone are one series; the number says the age.
    Folders without a manifest and links are left alone.
    """
    match = _NUMBERED.fullmatch(path.name)
    series = []
    for sibling in path.parent.iterdir():
        other = _NUMBERED.fullmatch(sibling.name)
        if match is None or other is None or other["series"] != match["series"]:
            continue
        if sibling != path and not sibling.is_symlink() and (sibling / MANIFEST).is_file():
            series.append((int(other["number"]), sibling))
    return [sibling for _, sibling in sorted(series)]
