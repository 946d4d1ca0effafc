"""What is shown while a run goes on."""

from __future__ import annotations

import io
import math
import re

import pytest
from megaopt_tools.progress import BarProgress, LineProgress, NoProgress, progress_for
from megaopt_tools.training import StepRecord
from rich.console import Console

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, legacy_windows=False)


def _record(step: int, seconds: float = 0.4) -> StepRecord:
    return StepRecord(step, math.log(2) * 3.5, 1e-3, 0.25, seconds / 4, seconds / 2, seconds / 4, 2048)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [70, 80, 140])
def test_a_terminal_gets_a_bar(width) -> None:
    """Name, bar, step, loss in the unit of the table, speed; time left, and at the end the time that it took."""
    console = _console(terminal=True, width=width)
    progress = progress_for(console, "adam", 250, name_width=len("adaptive_muon"))
    assert isinstance(progress, BarProgress)
    with progress:
        progress.stepped(_record(1))
        progress._bar.refresh()
        for step in range(2, 251):
            progress.stepped(_record(step))
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", _shown(console))) if line.strip()]
    first, last = next(line for line in lines if " left" in line), lines[-1]
    bar = 6 if width == 70 else 12
    shown = rf"adam          \S{{{bar}}}   1/250  3\.500 bits/byte   5\.1k tok/s   \d:\d\d left"
    assert re.fullmatch(shown, first), first
    assert re.search(r" 250/250  3\.500 bits/byte   5\.1k tok/s  took \d:\d\d$", last), last
    assert max(map(len, lines)) <= width


def test_the_bar_gives_way_where_there_is_no_room() -> None:
    """The speed goes next; step, loss and time stay whole."""
    console = _console(terminal=True, width=60)
    with progress_for(console, "muon", 250, name_width=13) as progress:
        progress.stepped(_record(1))
    assert re.search(r"muon +1/250  3\.500 bits/byte   \d:\d\d left", CONTROL.sub("", _shown(console)))


def test_a_pipe_gets_lines() -> None:
    """The first, the last, and every tenth of the way."""
    console = _console(terminal=False)
    progress = progress_for(console, "[muon]", 100)
    assert isinstance(progress, LineProgress)
    with progress:
        for step in range(1, 101):
            progress.stepped(_record(step))
    lines = _shown(console).splitlines()
    assert re.fullmatch(r"\[muon\]  step   1/100  3\.500 bits/byte   5\.1k tok/s   0:00 left", lines[0])
    assert lines[-1].endswith("  took 0:00")
    assert [line.split()[2] for line in lines] == [f"{step}/100" for step in (1, *range(10, 101, 10))]
    assert max(map(len, lines)) <= 70


def test_one_slow_step_hardly_moves_the_speed() -> None:
    """It is smoothed: a tenth of the last step, and nine tenths of what was there."""
    console = _console(terminal=False)
    progress = LineProgress(console, "adam", 2)
    progress.stepped(_record(1))
    progress.stepped(_record(2, seconds=4.0))
    assert [line.split()[5] for line in _shown(console).splitlines()] == ["5.1k", "4.7k"]


def test_quiet_shows_nothing() -> None:
    """Neither on a terminal nor in a pipe."""
    for terminal in (True, False):
        console = _console(terminal=terminal)
        progress = progress_for(console, "adam", 1, quiet=True)
        assert isinstance(progress, NoProgress)
        with progress:
            progress.stepped(_record(1))
        assert _shown(console) == ""
