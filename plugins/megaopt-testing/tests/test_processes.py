"""Ranks that the kit forks end with the process that has forked them."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent has died"
)

PROGRAM = """
import os, pathlib, sys, time
from megaopt_testing.processes import run_ranks

def wait(rank, size):
    pathlib.Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(900)

run_ranks(wait, 2)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_end_when_the_run_is_killed(tmp_path: Path) -> None:
    """By a signal that it cannot catch; ranks that compute would not notice for as long as they do."""
    end = time.monotonic() + 300.0
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)]) as run:
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        ranks = [int(entry.name) for entry in tmp_path.iterdir()]
        alive = [_is_alive(rank) for rank in ranks]
        run.kill()
    while any(map(_is_alive, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert alive == [True, True]
    assert not any(map(_is_alive, ranks))
