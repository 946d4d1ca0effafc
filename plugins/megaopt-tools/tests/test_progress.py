"""What is shown while a run goes on."""

from __future__ import annotations

import io

from megaopt_tools.progress import BarProgress, LineProgress, progress_for
from megaopt_tools.training import StepRecord
from rich.console import Console


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, legacy_windows=False)


def _record(step: int) -> StepRecord:
    return StepRecord(step, 5.5 - step, 1e-3, 0.25, 0.1, 0.2, 0.1, 2048)


def _shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_gets_a_bar() -> None:
    """With loss, learning rate, gradient norm and speed."""
    console = _console(terminal=True)
    progress = progress_for(console, "adam", 2)
    assert isinstance(progress, BarProgress)
    with progress:
        progress.stepped(_record(1))
        progress.stepped(_record(2))
    last = _shown(console)
    assert "2/2" in last
    assert "loss 3.500 lr 1.0e-03 grad norm 0.25   5,120 tokens/s" in last


def test_a_pipe_gets_lines() -> None:
    """The first, the last, and every tenth of the way."""
    console = _console(terminal=False)
    progress = progress_for(console, "[muon]", 100)
    assert isinstance(progress, LineProgress)
    with progress:
        for step in range(1, 101):
            progress.stepped(_record(step))
    lines = _shown(console).splitlines()
    assert lines[0] == "[muon]  step   1/100  loss 4.500  lr 1.0e-03  grad norm 0.25    5,120 tokens/s"
    assert [line.split()[2] for line in lines] == [f"{step}/100" for step in (1, *range(10, 101, 10))]


def test_a_missing_gradient_norm_is_a_dash() -> None:
    """Clipping may be off."""
    console = _console(terminal=False)
    LineProgress(console, "adam", 1).stepped(StepRecord(1, 5.0, 1e-3, None, 0.1, 0.2, 0.1, 10))
    assert "grad norm    -" in _shown(console)
