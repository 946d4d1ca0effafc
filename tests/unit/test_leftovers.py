"""What a test run starts ends with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found by Linux's /proc"),
]

RUN = f"""
import subprocess, sys, time
sys.path.insert(0, {str(ROOT / "tests")!r})
from leftovers import watch
watch()
left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(900)"], start_new_session=True)
print(left.pid, flush=True)
time.sleep(900)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_run_that_is_killed_leaves_no_process() -> None:
    """Not even one in a session of its own, which no signal to the run's group would reach."""
    unwatched = {name: value for name, value in os.environ.items() if name != "TEST_RUN_MARK"}
    with subprocess.Popen(
        [sys.executable, "-c", RUN], env=unwatched, stdout=subprocess.PIPE, text=True
    ) as run:
        left = int(run.stdout.readline())
        assert _is_alive(left)
        run.kill()
    end = time.monotonic() + 300.0
    while _is_alive(left) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_alive(left)


def test_this_run_is_watched() -> None:
    """The settings of every run see to it, and its workers know whose they are."""
    assert "TEST_RUN_MARK" in os.environ
