"""One run on the command line: shown while it goes on, logged, and written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megaopt_tools.errors import StoppedError
from megaopt_tools.event_log import EventLog
from megaopt_tools.pictures import draw_loss
from megaopt_tools.progress import progress_for
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import run_record, write_json
from megaopt_tools.text import Text
from megaopt_tools.training import RunResult, StepRecord, Watcher, train

if TYPE_CHECKING:
    from megaopt_core.optimizers.report import OptimizerReport

__all__ = ["run_into"]


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
    folder: Path, recipe: Recipe, text: Text, console: Console, threads: int, watchers: Sequence[Watcher] = ()
) -> RunResult:
    """Train, show progress, and write `run.json`, `loss.png` and a TensorBoard log.

    Args:
        folder: where the files go; it is there.
        recipe: what to train, and how.
        text: what to train on.
        console: where progress is shown.
        threads: torch's, for the record.
        watchers: told of every step, too.

    Returns:
        The result.

    Raises:
        StoppedError: Ctrl-C was pressed; only the TensorBoard log has been written.
    """
    counter = _StepCounter()
    try:
        with (
            EventLog(folder / "tensorboard") as log,
            progress_for(console, recipe.optimizer, recipe.steps) as progress,
        ):
            result = train(recipe, text, [counter, *watchers, log, progress])
    except KeyboardInterrupt:
        raise StoppedError(
            f"stopped by Ctrl-C after {counter.steps} of {recipe.steps} steps of {recipe.optimizer}; "
            f"{folder / 'run.json'} was not written",
            steps=counter.steps,
        ) from None
    draw_loss(result, folder / "loss.png")
    write_json(folder / "run.json", run_record(result, threads))
    return result
