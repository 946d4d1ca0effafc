"""Where a checkpoint is until it is complete, who may write there, and how it takes its place."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from attrs import frozen

from megaopt_checkpoint.files import exchange, remove_tree, sync_folder
from megaopt_checkpoint.lock import take_lock
from megaopt_checkpoint.manifest import MANIFEST
from megaopt_core.errors import CheckpointBusyError, CheckpointError

__all__ = ["Staging", "begin", "recover", "staging_folder"]

_PATIENCE = 5.0
"""Seconds that a load waits for a save which is between two renames."""


@frozen
class Staging:
    """The folder in which a new checkpoint grows; it lies beside the path, so that putting it in place is a rename.

    Args:
        path: where the checkpoint will be.
        folder: where it grows.
    """

    path: Path
    folder: Path

    def commit(self) -> None:
        """Put the finished checkpoint in place; whoever looks sees the old one or the new one, never none."""
        sync_folder(self.folder)
        if not self.path.exists():
            self.folder.rename(self.path)
        elif not exchange(self.folder, self.path):
            # Without an exchange there is a moment without the path; `recover` puts the old one back after it.
            previous = _previous(self.path)
            remove_tree(previous)
            self.path.rename(previous)
            self.folder.rename(self.path)
            remove_tree(previous)
        sync_folder(self.path.parent)


def staging_folder(path: Path) -> Path:
    """Return where a checkpoint grows.

    Args:
        path: where it will be.
    """
    return path.with_name(f".{path.name}.saving")


def begin(path: Path, held: ExitStack) -> Staging:
    """Take the lock of a path, remove what an interrupted save left, and make the folder.

    Args:
        path: where the checkpoint will be; absolute.
        held: owns lock and folder from the moment that they are there; closing it removes the folder, or the older
            checkpoint that has changed places with it, and gives the lock back.

    Raises:
        CheckpointBusyError: somebody is saving to this path.
        CheckpointError: something that is no checkpoint is in the way, or the folder cannot be made.
    """
    _require_replaceable(path)
    folder = staging_folder(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        take_lock(path, held)
        held.callback(remove_tree, folder)
        _bring_back(path)
        remove_tree(folder)
        folder.mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot save to {path}: {error}", path=str(path)) from error
    return Staging(path, folder)


def recover(path: Path) -> None:
    """Bring back the old checkpoint if a save was interrupted at the one moment when the path had neither.

    Args:
        path: where a checkpoint is expected.
    """
    if path.exists() or not (_previous(path) / MANIFEST).exists():
        return
    try:
        with ExitStack() as held:
            take_lock(path, held)
            _bring_back(path)
            held.close()  # in here, where an interrupt still finds its way to it
    except CheckpointBusyError:
        until = time.monotonic() + _PATIENCE
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of {path} is at {_previous(path)} and cannot be moved: {error}", path=str(path)
        ) from error


def _bring_back(path: Path) -> None:
    previous = _previous(path)
    if not path.exists() and (previous / MANIFEST).exists():
        previous.rename(path)


def _previous(path: Path) -> Path:
    return path.with_name(f".{path.name}.previous")


def _require_replaceable(path: Path) -> None:
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a symbolic link to {path.readlink()}: saving would replace the link, so give the path that it "
            "points to",
            path=str(path),
        )
    if path.is_dir() and (not any(path.iterdir()) or (path / MANIFEST).exists()):
        return
    if path.exists():
        raise CheckpointError(f"{path} exists and is no checkpoint; it is not replaced", path=str(path))
