"""How a run is shown while it goes on: a bar on a terminal, lines in a file or pipe."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from megaopt_tools.training import RunResult, StepRecord

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["BarProgress", "LineProgress", "NoProgress", "RunProgress", "progress_for", "shown_time"]

_LINES = 10
"""So many lines tell of a run where no bar can be shown."""

_WIDEST_BAR, _NARROWEST_BAR = 12, 4

_REST = len("  /  3.500 bits/byte  10.1k tok/s  10:00 left")

_SMOOTHING = 0.9
"""How much of the speed so far stays when a step is added."""


class RunProgress(Protocol):
    """Shows one run; used in a `with` statement."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def built(self, report: OptimizerReport) -> None:
        """The optimizer is there."""

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """The run goes on after these steps."""

    def stepped(self, record: StepRecord) -> None:
        """A step was taken."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""


def progress_for(
    console: Console, name: str, steps: int, *, name_width: int = 0, quiet: bool = False
) -> RunProgress:
    """Return what shows a run best on this console.

    Args:
        console: where to show it.
        name: of the run.
        steps: how many there will be.
        name_width: of the longest name among runs that are shown below each other.
        quiet: show nothing.
    """
    if quiet:
        return NoProgress()
    kind = BarProgress if console.is_terminal else LineProgress
    return kind(console, name.ljust(name_width), steps)


def shown_time(seconds: float) -> str:
    """Return a time as a clock shows it.

    Args:
        seconds: not negative.

    Example:
        >>> shown_time(7.6), shown_time(75), shown_time(3700)
        ('0:08', '1:15', '1:01:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Told:
    """What both kinds of progress tell of a run, in columns of fixed width.

    Args:
        steps: how many there will be.
        clock: seconds since some moment.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._clock = clock
        self._begin = clock()
        self._first = 0
        self._speed = 0.0

    def resume(self, first: int) -> None:
        """Leave out the steps of an earlier process, which took no time of this one.

        Args:
            first: how many they were.
        """
        self._first = first

    def words(self, record: StepRecord, *, with_speed: bool = True) -> str:
        """Return step, loss, speed and time after a step."""
        speed = record.tokens / record.seconds
        self._speed = _SMOOTHING * self._speed + (1 - _SMOOTHING) * speed if self._speed else speed
        passed = self._clock() - self._begin
        if record.step < self._steps:
            left = passed / (record.step - self._first) * (self._steps - record.step)
            times = f"{shown_time(left):>5} left"
        else:
            times = f"took {shown_time(passed)}"
        bits = record.loss / math.log(2)
        width = len(str(self._steps))
        speed_shown = f"{_short(self._speed):>5} tok/s  " if with_speed else ""
        return f"{record.step:>{width}}/{self._steps}  {bits:.3f} bits/byte  {speed_shown}{times:<10}"


def _short(value: float) -> str:
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"


class BarProgress:
    """A bar with step, loss, speed and time; 70 columns are enough for it.

    Args:
        console: a terminal.
        name: of the run.
        steps: how many there will be.
    """

    def __init__(self, console: Console, name: str, steps: int) -> None:
        room = console.width - len(name) - 2 * len(str(steps)) - _REST
        self._with_speed = room >= 0
        bar = [BarColumn(bar_width=min(room, _WIDEST_BAR))] if room >= _NARROWEST_BAR else []
        self._bar = Progress(
            TextColumn("[bold]{task.description}", markup=True),
            *bar,
            TextColumn("{task.fields[shown]}", markup=False),
            console=console,
        )
        self._told = _Told(steps)
        self._task = self._bar.add_task(name.replace("[", "\\["), total=steps, shown="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def built(self, report: OptimizerReport) -> None:
        """Show nothing: the bar is there already."""

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """Begin where the earlier process ended."""
        self._told.resume(len(records))
        self._bar.update(self._task, completed=len(records))

    def stepped(self, record: StepRecord) -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=1, shown=self._told.words(record, with_speed=self._with_speed))

    def finished(self, result: RunResult) -> None:
        """Leave the bar as it is."""


class LineProgress:
    """A line for every tenth of a run.

    Args:
        console: where lines go.
        name: of the run.
        steps: how many there will be.
    """

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console = console
        self._name = name
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._told = _Told(steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def built(self, report: OptimizerReport) -> None:
        """Show nothing: the first line comes with the first step."""

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """Print a line that says where the run goes on."""
        self._told.resume(len(records))
        line = f"{self._name}  goes on after step {len(records)} of {self._steps}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stepped(self, record: StepRecord) -> None:
        """Print a line if it is time for one."""
        words = self._told.words(record)
        if record.step % self._every == 0 or record.step in (1, self._steps):
            line = f"{self._name}  step {words}".rstrip()
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finished(self, result: RunResult) -> None:
        """Show nothing: the last line came with the last step."""


class NoProgress:
    """Shows nothing, for `--quiet` and `--json`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def built(self, report: OptimizerReport) -> None:
        """Show nothing."""

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """Show nothing."""

    def stepped(self, record: StepRecord) -> None:
        """Show nothing."""

    def finished(self, result: RunResult) -> None:
        """Show nothing."""
