"""One run on the command line: shown while it goes on, logged, and written down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megaopt_tools.checkpoints import RunCheckpoint
from megaopt_tools.errors import CommandError, StoppedError
from megaopt_tools.event_log import EventLog
from megaopt_tools.pictures import draw_loss
from megaopt_tools.progress import progress_for
from megaopt_tools.records import run_record, write_json
from megaopt_tools.training import Run, RunResult, Watcher

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


def run_into(
    run: Run,
    folder: Path,
    console: Console,
    threads: int,
    checkpoint: RunCheckpoint,
    watchers: Sequence[Watcher] = (),
    *,
    name_width: int = 0,
    quiet: bool = False,
) -> RunResult:
    """Train, show progress, and write `run.json`, `loss.png` and a TensorBoard log.

    With several ranks, the first one shows and writes.

    Args:
        run: what to train.
        folder: where the files go; made if it is not there.
        console: where progress is shown.
        threads: torch's, for the record.
        checkpoint: saves the run.
        watchers: told of every step, too.
        name_width: of the longest name among runs that are shown below each other.
        quiet: show no progress.

    Returns:
        The result.

    Raises:
        CommandError: the folder cannot be made.
        StoppedError: Ctrl-C was pressed; only the TensorBoard log and the checkpoint have been written.
    """
    recipe = run.recipe
    make_folder(folder)
    try:
        if not run.ranks.is_first:
            return run.train(keeper=checkpoint)
        with (
            EventLog(folder / "tensorboard") as log,
            progress_for(
                console, recipe.optimizer, recipe.steps, name_width=name_width, quiet=quiet
            ) as progress,
        ):
            result = run.train([*watchers, log, progress], checkpoint)
    except KeyboardInterrupt:
        steps = len(run.records)
        raise StoppedError(
            f"stopped by Ctrl-C after {steps} of {recipe.steps} steps of {recipe.optimizer}; "
            f"{checkpoint.advice()}",
            steps=steps,
        ) from None
    draw_loss(result, folder / "loss.png")
    write_json(folder / "run.json", run_record(result, threads))
    return result
