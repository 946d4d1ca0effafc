"""Processes that tests start end with the test, whatever ends that."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died"),
]

PROGRAM = """
import sys
sys.path[:0] = {folders!r}
import launch, test_launch, warm
warm.OTHERS.clear(), warm.PACKAGES.clear()  # ranks that wait need none of it
if __name__ == "__main__":
    launch.launch(test_launch.waits, 2, {pids!r})
"""


def waits(rank: int, size: int, folder: Path) -> None:
    """Say which process this is, and wait for longer than any test."""
    Path(folder, str(os.getpid())).touch()
    time.sleep(900)


def is_alive(pid: int) -> bool:
    """Return whether a process is there and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_no_process_is_left_when_a_run_is_killed(tmp_path):
    """Killed by a signal that nobody can catch, it cannot end its ranks itself."""
    pids = tmp_path / "pids"
    pids.mkdir()
    program = tmp_path / "program.py"
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    program.write_text(PROGRAM.format(folders=folders, pids=str(pids)))
    run = subprocess.Popen([sys.executable, str(program)])
    try:
        assert within(300.0, lambda: len(list(pids.iterdir())) == 2)
    finally:
        run.kill()
        run.wait()
    ranks = [int(entry.name) for entry in pids.iterdir()]
    assert within(120.0, lambda: not any(map(is_alive, ranks)))
