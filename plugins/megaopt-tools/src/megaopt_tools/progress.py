"""How a run is shown while it goes on: a bar on a terminal, lines in a file or pipe."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megaopt_tools.training import RunResult, StepRecord

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["BarProgress", "LineProgress", "RunProgress", "progress_for"]

_LINES = 10
"""So many lines tell of a run where no bar can be shown."""


class RunProgress(Protocol):
    """Shows one run; used in a `with` statement."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def built(self, report: OptimizerReport) -> None:
        """The optimizer is there."""

    def stepped(self, record: StepRecord) -> None:
        """A step was taken."""

    def finished(self, result: RunResult) -> None:
        """The run is over."""


def progress_for(console: Console, name: str, steps: int) -> RunProgress:
    """Return what shows a run best on this console.

    Args:
        console: where to show it.
        name: of the run.
        steps: how many there will be.
    """
    return (BarProgress if console.is_terminal else LineProgress)(console, name, steps)


class BarProgress:
    """A bar with loss, learning rate, gradient norm and tokens per second.

    Args:
        console: a terminal.
        name: of the run.
        steps: how many there will be.
    """

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._bar.add_task(name, total=steps, shown="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def built(self, report: OptimizerReport) -> None:
        """Show nothing: the bar is there already."""

    def stepped(self, record: StepRecord) -> None:
        """Move the bar."""
        self._bar.update(self._task, advance=1, shown=_shown(record, " "))

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def built(self, report: OptimizerReport) -> None:
        """Show nothing: the first line comes with the first step."""

    def stepped(self, record: StepRecord) -> None:
        """Print a line if it is time for one."""
        if record.step % self._every == 0 or record.step in (1, self._steps):
            width = len(str(self._steps))
            line = f"{self._name}  step {record.step:>{width}}/{self._steps}  {_shown(record, '  ')}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def finished(self, result: RunResult) -> None:
        """Show nothing: the last line came with the last step."""


def _shown(record: StepRecord, gap: str) -> str:
    norm = "   -" if record.grad_norm is None else f"{record.grad_norm:4.2f}"
    speed = f"{record.tokens / record.seconds:>7,.0f} tokens/s"
    return gap.join((f"loss {record.loss:5.3f}", f"lr {record.lr:.1e}", f"grad norm {norm}", speed))
