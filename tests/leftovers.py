"""End what a test run leaves behind, however the run itself ends: also by a signal that nobody can catch.

A process beside the run waits for its end, and kills what still carries the run's mark in its environment. Whatever a
test starts inherits the mark.
"""

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MARK", "watch"]

MARK = "TEST_RUN_MARK"
"""The variable that marks all processes of a run, those of pytest-xdist among them."""


def watch() -> None:
    """Start the process that waits for the end of this one; inside a run that is watched, nothing is done."""
    if sys.platform != "linux" or MARK in os.environ:
        return
    run = f"{os.getpid()}-{os.urandom(4).hex()}"
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_RDWR, 0) for stream in range(3)]
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), run]
    os.posix_spawn(sys.executable, command, os.environ, file_actions=quiet)
    os.environ[MARK] = run


def _marked(run: str) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and f"{MARK}={run}".encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has ended, or is somebody else's
            continue


def _main(parent: int, run: str) -> None:
    os.setsid()  # an interrupt is for the run
    waiting = select.poll()
    try:
        waiting.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        pass
    else:
        waiting.poll()
    for pid in _marked(run):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2])
