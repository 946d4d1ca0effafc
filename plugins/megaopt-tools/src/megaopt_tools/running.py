"""One run on the command line: shown while it goes on, logged, and written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megaopt_tools.errors import CommandError, StoppedError
from megaopt_tools.event_log import EventLog
from megaopt_tools.pictures import draw_loss
from megaopt_tools.progress import progress_for
from megaopt_tools.records import run_record, write_json
from megaopt_tools.training import Run, RunResult, StepRecord, Watcher

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["make_folder", "run_into"]


def make_folder(path: Path) -> None:
    """Make a folder to write into, if it is not there.

    Args:
        path: the folder.

    Raises:
        CommandError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out {path}: cannot make a folder there: {error.strerror}") from error


class _StepCounter:
    """Counts steps, so that an interruption can say how far it got."""

    def __init__(self) -> None:
        self.steps = 0

    def built(self, report: OptimizerReport) -> None:
        """Begin at zero."""

    def stepped(self, record: StepRecord) -> None:
        """Count."""
        self.steps = record.step

    def finished(self, result: RunResult) -> None:
        """Nothing is left to count."""


def run_into(
    run: Run,
    folder: Path,
    console: Console,
    threads: int,
    watchers: Sequence[Watcher] = (),
    *,
    name_width: int = 0,
    quiet: bool = False,
) -> RunResult:
    """Train, show progress, and write `run.json`, `loss.png` and a TensorBoard log.

    Args:
        run: what to train.
        folder: where the files go; made if it is not there.
        console: where progress is shown.
        threads: torch's, for the record.
        watchers: told of every step, too.
        name_width: of the longest name among runs that are shown below each other.
        quiet: show no progress.

    Returns:
        The result.

    Raises:
        CommandError: the folder cannot be made.
        StoppedError: Ctrl-C was pressed; only the TensorBoard log has been written.
    """
    recipe = run.recipe
    make_folder(folder)
    counter = _StepCounter()
    try:
        with (
            EventLog(folder / "tensorboard") as log,
            progress_for(
                console, recipe.optimizer, recipe.steps, name_width=name_width, quiet=quiet
            ) as progress,
        ):
            result = run.train([counter, *watchers, log, progress])
    except KeyboardInterrupt:
        raise StoppedError(
            f"stopped by Ctrl-C after {counter.steps} of {recipe.steps} steps of {recipe.optimizer}; "
            f"{folder / 'run.json'} was not written",
            steps=counter.steps,
        ) from None
    draw_loss(result, folder / "loss.png")
    write_json(folder / "run.json", run_record(result, threads))
    return result
