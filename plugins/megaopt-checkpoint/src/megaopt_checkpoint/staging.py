"""Where a checkpoint is until it is complete, who may write there, and how it takes its place."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Self

from attrs import define, field

from megaopt_checkpoint.files import exchange, remove_tree, sync_folder
from megaopt_checkpoint.manifest import MANIFEST
from megaopt_core.errors import CheckpointBusyError, CheckpointError

__all__ = ["Staging", "recover"]

_OURS: set[Path] = set()


@define(eq=False)
class Staging:
    """The right to save to one path, and the folder in which the new checkpoint grows.

    The folder lies beside the path, so that putting it in place is a rename. The lock is one of the operating system:
    it ends with the process, however that ends.

    Args:
        path: where the checkpoint will be.
        folder: where it grows.
    """

    path: Path
    folder: Path
    _lock: Path
    _descriptor: int | None = field(default=None)

    @classmethod
    def begin(cls, path: Path) -> Self:
        """Take the lock, remove what an interrupted save left, and make the folder.

        Args:
            path: where the checkpoint will be; absolute.

        Raises:
            CheckpointBusyError: somebody is saving to this path.
            CheckpointError: something that is no checkpoint is in the way, or the folder cannot be made.
        """
        _require_replaceable(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f".{path.name}.lock")
            staging = cls(path, path.with_name(f".{path.name}.saving"), lock, _take_lock(path, lock))
        except OSError as error:
            raise CheckpointError(f"cannot save to {path}: {error}", path=str(path)) from error
        try:
            recover(path)
            remove_tree(staging.folder)
            staging.folder.mkdir()
        except OSError as error:
            staging.release()
            raise CheckpointError(f"cannot save to {path}: {error}", path=str(path)) from error
        return staging

    def commit(self) -> None:
        """Put the finished checkpoint in place; whoever looks sees the old one or the new one, never none."""
        sync_folder(self.folder)
        if not self.path.exists():
            self.folder.rename(self.path)
        elif not exchange(self.folder, self.path):
            # Without an exchange there is a moment without the path; `recover` puts the old one back after it.
            previous = _previous(self.path)
            self.path.rename(previous)
            self.folder.rename(self.path)
            remove_tree(previous)
        sync_folder(self.path.parent)
        self.abandon()

    def abandon(self) -> None:
        """Remove the folder and let go of the lock; the checkpoint at the path stays as it is."""
        if self._descriptor is not None:
            remove_tree(self.folder)
        self.release()

    def release(self) -> None:
        """Let go of the lock."""
        if self._descriptor is None:
            return
        self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = None
        _OURS.discard(self.path)


def recover(path: Path) -> None:
    """Bring back the old checkpoint if a save was interrupted at the one moment when the path had neither.

    Args:
        path: where a checkpoint is expected.
    """
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


def _take_lock(path: Path, lock: Path) -> int:
    if path in _OURS:
        raise CheckpointBusyError(
            f"this process is still saving to {path}: wait for the asynchronous save before (`pending.result()`)",
            path=str(path),
        )
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise CheckpointBusyError(
                f"another run is saving to {path} at this moment ({owner}): let every run save to a path of its own",
                path=str(path),
            ) from error
        if _is_at(descriptor, lock):
            break
        os.close(descriptor)  # whoever had the lock removed the file meanwhile
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _OURS.add(path)
    return descriptor


def _is_at(descriptor: int, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except FileNotFoundError:
        return False
