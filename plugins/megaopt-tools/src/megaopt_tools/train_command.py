"""`megaopt train`: train a small GPT with one optimizer."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megaopt_core.config import parse_assignments
from megaopt_tools.checkpoints import RunCheckpoint, require_checkpoint
from megaopt_tools.cli.output import print_json
from megaopt_tools.console import console_for_output, print_text, say
from megaopt_tools.errors import StoppedError
from megaopt_tools.interrupts import Interrupts
from megaopt_tools.launch import launch
from megaopt_tools.options import recipe_of, use_threads
from megaopt_tools.ranks import Ranks
from megaopt_tools.records import run_record
from megaopt_tools.running import make_folder, run_into
from megaopt_tools.text import load_text
from megaopt_tools.training import Run, RunResult, StepRecord

if TYPE_CHECKING:
    from megaopt_core.reporting import OptimizerReport

__all__ = ["run_train"]


def run_train(args: Namespace) -> int:
    """Train as the options say, and print what came out.

    Args:
        args: the parsed options.

    Returns:
        0; 1 when training diverged; 130 after Ctrl-C.

    Raises:
        MegaoptError: an option cannot be used as it is.
    """
    recipe = recipe_of(args, args.optimizer, args.lr, parse_assignments(args.assignments))
    text = load_text(args.text)
    folder = args.out or Path("runs") / args.optimizer
    ranks = Ranks.current()
    interrupts = Interrupts()
    run = Run(recipe, text, ranks)
    checkpoint = RunCheckpoint(folder, interrupts, every=args.save_every)
    if args.resume:
        require_checkpoint([folder])
        checkpoint.load(run)
    make_folder(folder)
    if args.nproc > ranks.count:
        return launch("train", args)
    with interrupts:
        return _train(args, run, folder, checkpoint)


def _train(args: Namespace, run: Run, folder: Path, checkpoint: RunCheckpoint) -> int:
    """Train, and print what came out."""
    threads = use_threads(args.threads, args.nproc)
    console = console_for_output()
    first = run.ranks.is_first
    quiet = args.quiet or args.json
    if first and not quiet:
        print_text(console, run.text)
    try:
        watchers = [] if quiet else [_ReportPrinter(console)]
        result = run_into(run, folder, console, threads, checkpoint, watchers, quiet=quiet)
    except StoppedError as stopped:
        if first:
            print(f"megaopt: {stopped}", file=sys.stderr)
        return 130
    if first:
        checkpoint.remove()
        _show(args, result, folder, console, threads)
    return 0 if result.diverged_at is None else 1


def _show(args: Namespace, result: RunResult, folder: Path, console: Console, threads: int) -> None:
    """Print the result as the options ask for it."""
    if args.json:
        print_json(run_record(result, threads))
    else:
        _print_result(console, result, folder, with_report=not args.quiet)


class _ReportPrinter:
    """Prints who steps what, before the first step."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def built(self, report: OptimizerReport) -> None:
        """Print the report, as wide as the terminal."""
        say(self._console, f"{report.text(self._console.width)}\n")

    def resumed(self, records: Sequence[StepRecord]) -> None:
        """Print nothing: the progress says where the run goes on."""

    def stepped(self, record: StepRecord) -> None:
        """Print nothing."""

    def finished(self, result: RunResult) -> None:
        """Print nothing: the bar is still there."""


def _print_result(console: Console, result: RunResult, folder: Path, *, with_report: bool) -> None:
    if result.val_bits_per_byte is None:
        where = (
            "of the held-out text was not finite after" if result.trained_to_the_end else "was not finite at"
        )
        outcome = f"none: the loss {where} step {result.diverged_at}; --lr {result.peak_lr:g} may be too high"
    else:
        outcome = f"{result.val_bits_per_byte:.4f} bits per byte on the held-out text"
    times = ", ".join(f"{part} {value:.1f} ms" for part, value in result.milliseconds.items())
    if with_report:
        say(console, f"\n{result.report.summary(console.width)}\n")
    console.print(f"result  {outcome}", markup=False)
    console.print(f"time    {times} a step; {result.tokens_per_second:,.0f} tokens/s", markup=False)
    say(console, f"files   {folder}: run.json, loss.png, tensorboard")
