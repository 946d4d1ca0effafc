"""Who may save to a path: one run at a time."""

from __future__ import annotations

import errno
import os
import socket
import stat
import warnings
from contextlib import ExitStack, closing, suppress
from io import FileIO
from pathlib import Path

from megaopt_core.errors import CheckpointBusyError, CheckpointError, CheckpointWarning

try:
    import fcntl
except ImportError:  # Windows has no such locks: there a file that exists is one
    fcntl = None  # type: ignore[assignment]

__all__ = ["take_lock"]

# A link that somebody planted is not followed, and a pipe does not let the save wait.
_FLAGS = os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_OWNER = b"process "

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a file system answers that has no locks, as Lustre without `-o flock` and some mounts of NFS."""

_TOLD: set[int] = set()
"""The file systems of which this process has said so."""


def take_lock(path: Path, held: ExitStack) -> None:
    """Take the right to save to a path.

    The lock is one of the operating system: it ends with the process, however that ends. Where the system has none, the
    lock is the file itself, which a killed process leaves behind. A file system without locks is told of once: there
    two runs are not told apart.

    Args:
        path: where the checkpoint will be; absolute.
        held: gives the lock back when it is closed, and owns it from the moment that it is taken.

    Raises:
        CheckpointBusyError: another run has it, or this process.
        CheckpointError: something else is where the lock should be.
        OSError: the file cannot be made.
    """
    lock = path.with_name(f".{path.name}.lock")
    while not _take(path, lock, held):
        pass


def _take(path: Path, lock: Path, held: ExitStack) -> bool:
    """Return whether the lock was taken; False when whoever had it has removed the file meanwhile."""
    try:
        file = held.enter_context(closing(FileIO(str(lock), "r+", opener=_open)))
    except FileExistsError as error:
        raise _busy(path, lock, _read_owner(lock)) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _no_lock(lock, "is a symbolic link") from error
        raise
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise _no_lock(lock, "is no file of its own")
    try:
        has_locks = _lock(file)
    except BlockingIOError as error:
        raise _busy(path, lock, file.read(200)) from error
    if not _is_at(file, lock):
        file.close()
        return False
    owner = file.read(200)
    if owner and not owner.startswith(_OWNER):
        raise _no_lock(lock, "holds something else")
    held.callback(_remove, file, lock)
    file.seek(0)
    file.truncate()
    file.write(_myself())
    if not has_locks:
        _warn_once(path, found.st_dev)
    return True


def _lock(file: FileIO) -> bool:
    """Lock a file as long as it is open; return False where its file system has no locks."""
    if fcntl is None:
        return True  # the file itself is the lock
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _warn_once(path: Path, file_system: int) -> None:
    if file_system in _TOLD:
        return
    _TOLD.add(file_system)
    warnings.warn(
        f"the file system of {path} has no locks: if two runs save to one path, neither is told of the other, so let "
        "every run save to a path of its own",
        CheckpointWarning,
        stacklevel=2,
    )


def _open(name: str, flags: int) -> int:
    return os.open(name, flags | _FLAGS | (os.O_EXCL if fcntl is None else 0), 0o644)


def _myself() -> bytes:
    return _OWNER + f"{os.getpid()} on {socket.gethostname()}\n".encode()


def _is_at(file: FileIO, lock: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), lock.lstat())
    except FileNotFoundError:
        return False


def _remove(file: FileIO, lock: Path) -> None:
    """Remove the file while it is locked, so that nobody else's is removed."""
    if fcntl is None:
        file.close()  # Windows removes no file that is open
    with suppress(OSError):
        lock.unlink()


def _read_owner(lock: Path) -> bytes:
    with suppress(OSError), lock.open("rb") as file:
        return file.read(200)
    return b""


def _busy(path: Path, lock: Path, owner: bytes) -> CheckpointBusyError:
    if owner == _myself():
        return CheckpointBusyError(
            f"this process is still saving to {path}: wait for the asynchronous save before (`pending.result()`)",
            path=str(path),
        )
    name = owner.decode(errors="replace").strip() or "another process"
    left = "" if fcntl is not None else f". If it was killed, remove {lock}"
    return CheckpointBusyError(
        f"another run is saving to {path} at this moment ({name}): let every run save to a path of its own{left}",
        path=str(path),
    )


def _no_lock(lock: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{lock} {what}, so it cannot be the lock of a save and is left as it is; remove it", path=str(lock)
    )
