"""A checkpoint's folder, held while it is read: whatever takes its name meanwhile, its files are those of one save."""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from pathlib import Path
from typing import Self
from weakref import finalize

from attrs import frozen

from megaopt_core.errors import CheckpointCorruptError, CheckpointError

__all__ = ["MOST_OPEN", "HeldFile", "HeldFolder", "folder_path"]

MOST_OPEN = 128
"""Files that stay open at one time: a checkpoint of 1,024 ranks has more than a process may open."""

_AT_ONCE = 2**30
"""Bytes of one read: systems have limits of about two gigabytes."""

_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_BY_FOLDER = os.open in os.supports_dir_fd
_READ = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a checkpoint; links are not followed.

    Args:
        path: as a user gave it.

    Raises:
        CheckpointError: it is no path, or an empty one.
    """
    given = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not (isinstance(given, str) and given):
        shown = repr(path) if isinstance(path, (str, bytes)) else type(path).__name__
        raise CheckpointError(
            f"path: got {shown}; give the path of a checkpoint, as a string or a pathlib.Path"
        )
    place = Path(os.path.abspath(given))  # noqa: PTH100 - resolve() would follow a link that is refused
    try:
        os.lstat(place)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # who writes or reads there finds that out, and says it
    except (OSError, ValueError) as error:  # too long a name, or a NUL in it
        reason = getattr(error, "strerror", None) or str(error)
        shown = given if len(given) <= 60 else given[:60] + "..."
        raise CheckpointError(f"path: {shown!r} cannot be a path: {reason}") from error
    return place


@frozen(eq=False)
class HeldFile:
    """A regular file of a held folder, open for reading.

    Args:
        path: what errors call it.
        descriptor: of the open file.
        size: in bytes, when it was opened.
    """

    path: Path
    descriptor: int
    size: int

    def read_into(self, position: int, memory: memoryview) -> int:
        """Read bytes, and return how many there were.

        Args:
            position: of the first in the file.
            memory: receives them.

        Raises:
            CheckpointError: the system cannot read them.
        """
        done = 0
        try:
            while done < len(memory):
                count = _read_at(self.descriptor, position + done, memory[done : done + _AT_ONCE])
                if not count:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error.strerror}", path=str(self.path)
            ) from error
        return done


def _read_at(descriptor: int, position: int, memory: memoryview) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [memory], position)
    os.lseek(descriptor, position, os.SEEK_SET)
    data = os.read(descriptor, len(memory))
    memory[: len(data)] = data
    return len(data)


class HeldFolder:
    """An open folder: its files are found in it, not under its name, so that a rename does not change what is read.

    A file that is opened again must be the one that it was. Links are not followed, and what is no regular file is
    not read.

    Args:
        path: the folder.

    Raises:
        CheckpointError: there is no such folder, or it is a symbolic link.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = folder_path(path)
        _require_folder(self.path)
        self._files: OrderedDict[str, HeldFile] = OrderedDict()
        self._seen: dict[str, tuple[int, ...]] = {}
        self._descriptor: int | None = None
        try:
            if _BY_FOLDER:
                self._descriptor = os.open(self.path, _READ | _NO_LINK | getattr(os, "O_DIRECTORY", 0))
                found = os.fstat(self._descriptor)
            else:
                found = self.path.lstat()
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}", path=str(self.path)) from error
        self._identity = found.st_dev, found.st_ino
        self.close = finalize(self, _close, self._files, self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_current(self) -> bool:
        """True while the path still leads to this folder."""
        try:
            found = self.path.lstat()
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._identity

    def names(self) -> set[str]:
        """Return the names of what is in the folder."""
        return set(os.listdir(self.path if self._descriptor is None else self._descriptor))  # noqa: PTH208 - a descriptor

    def open(self, name: str) -> HeldFile:
        """Return one of its files, open; the same one at every call.

        Args:
            name: without a folder.

        Raises:
            CheckpointCorruptError: it is missing, a link, no regular file, or not the one that it was.
            CheckpointError: it cannot be read.
        """
        held = self.find(name)
        if held is None:
            what = (
                "is missing" if self.is_current else "is gone: the checkpoint was replaced while it was read"
            )
            raise CheckpointCorruptError(f"{self.path / name} {what}", path=str(self.path / name))
        return held

    def find(self, name: str) -> HeldFile | None:
        """Return what :meth:`open` does, None when there is no such file.

        Args:
            name: without a folder.
        """
        held = self._files.get(name)
        if held is not None:
            self._files.move_to_end(name)
            return held
        while len(self._files) >= MOST_OPEN:
            os.close(self._files.popitem(last=False)[1].descriptor)
        held = self._opened(name)
        if held is not None:
            self._files[name] = held
        return held

    def _opened(self, name: str) -> HeldFile | None:
        path = self.path / name
        place = path if self._descriptor is None else name
        try:
            if self._descriptor is None and path.is_symlink():
                raise OSError(errno.ELOOP, "is a link")  # noqa: TRY301 - as the system says it elsewhere
            # A pipe would let whoever opens it wait for its other end.
            descriptor = os.open(place, _READ | _NO_LINK | _NO_WAIT, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CheckpointCorruptError(
                    f"{path} is a symbolic link, not a file of the checkpoint", path=str(path)
                ) from error
            raise CheckpointError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        is_regular = stat.S_ISREG(found.st_mode)
        if is_regular and self._seen.setdefault(name, identity) == identity:
            return HeldFile(path, descriptor, found.st_size)
        os.close(descriptor)
        what = "was changed while it was read" if is_regular else "is no regular file"
        raise CheckpointCorruptError(f"{path} {what}", path=str(path))

    def read(self, name: str, most: int) -> bytes | None:
        """Return the contents of a small file, None when there is no such file.

        Args:
            name: without a folder.
            most: bytes that it may have.

        Raises:
            CheckpointCorruptError: it has more.
            CheckpointError: it cannot be read.
        """
        file = self.find(name)
        if file is None:
            return None
        if file.size > most:
            raise CheckpointCorruptError(
                f"{file.path} has {file.size} bytes, more than the {most} that it may have",
                path=str(file.path),
            )
        data = bytearray(file.size)
        count = file.read_into(0, memoryview(data))
        return bytes(data[:count])


def _close(files: OrderedDict[str, HeldFile], descriptor: int | None) -> None:
    while files:
        os.close(files.popitem()[1].descriptor)
    if descriptor is not None:
        os.close(descriptor)


def _require_folder(folder: Path) -> None:
    if folder.is_symlink():
        raise CheckpointError(
            f"{folder} is a symbolic link to {folder.readlink()}: it can change under a run, so give the checkpoint's "
            "own path",
            path=str(folder),
        )
    if not folder.exists():
        raise CheckpointError(f"there is no checkpoint at {folder}", path=str(folder))
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file, a checkpoint is a folder; `megaopt convert` reads consolidated files",
            path=str(folder),
        )
