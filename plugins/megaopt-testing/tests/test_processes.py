"""Ranks that the kit forks: they end with the process that has forked them, and hash text each in its own way."""

import subprocess
import sys
import time
from enum import Enum
from pathlib import Path

import pytest
from megaopt_testing.processes import run_ranks

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


class Colour(Enum):
    """Whose members hash by their names."""

    RED = "red"


class Named:
    """Hashes by a name, through a method of its own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self) -> int:
        return self._number()

    def _number(self) -> int:
        return hash(self.name)


BEFORE = {Colour.RED: "colour", Named("a"): "name"}
"""Filled before any rank is forked."""


def _hashes(rank: int, size: int) -> tuple[int, str | None, str | None]:
    return hash("layer.weight"), BEFORE.get(Colour.RED), BEFORE.get(Named("a"))


def test_ranks_hash_text_unlike_and_find_what_was_there_before() -> None:
    """As processes of a launcher do; a compiler's tables with members of an `Enum` were lost on every rank but one."""
    texts, colours, names = zip(*run_ranks(_hashes, 2), strict=True)
    assert len(set(texts)) == 2
    assert colours == ("colour", "colour")
    assert names == ("name", "name")
