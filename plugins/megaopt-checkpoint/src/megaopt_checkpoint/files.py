"""Files and folders that survive a crash: written, synced, and put in place in one move."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

__all__ = ["exchange", "remove_tree", "sync_folder", "write_durably"]

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and return when it is on the disk.

    Args:
        path: the file; nothing may be there yet, not even a link.
        data: its contents.
    """
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk.

    Args:
        folder: an existing folder.
    """
    if os.name == "nt":
        return  # Windows opens no folders, and writes names by itself
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def exchange(first: Path, second: Path) -> bool:
    """Let two existing paths swap names in one step, where the system can do that.

    Args:
        first: an existing path.
        second: an existing path on the same file system.

    Returns:
        False when the system cannot; nothing has changed then.
    """
    try:
        rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    except (OSError, TypeError):  # no such library
        rename = None
    if rename is None:
        return False
    failed: int = rename(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return failed == 0


def remove_tree(folder: Path) -> None:
    """Remove a folder and what is in it; links are removed, not followed.

    Args:
        folder: may be gone already.
    """
    shutil.rmtree(folder, ignore_errors=True)
