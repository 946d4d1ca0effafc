"""`megaopt compare`: train the same GPT with several optimizers."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megaopt_core import get_registry
from megaopt_tools.checkpoints import RunCheckpoint, require_checkpoint
from megaopt_tools.cli.output import print_json
from megaopt_tools.console import console_for_output, print_text, say
from megaopt_tools.errors import CommandError, StoppedError
from megaopt_tools.interrupts import Interrupts
from megaopt_tools.launch import launch
from megaopt_tools.options import recipe_of, use_threads
from megaopt_tools.pictures import draw_comparison
from megaopt_tools.ranks import Ranks
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import comparison_record, write_json
from megaopt_tools.running import make_folder, run_into
from megaopt_tools.targets import learning_rates, settings_by_target
from megaopt_tools.text import load_text
from megaopt_tools.training import PARTS, Run, RunResult

__all__ = ["run_compare"]

_WIDE, _MEDIUM = 110, 72
"""From these widths on the table has all columns, and the times of a step's three parts."""


def run_compare(args: Namespace) -> int:
    """Train with every optimizer in turn, and print and draw them beside each other.

    Args:
        args: the parsed options.

    Returns:
        0; 1 when training diverged with one of them; 130 after Ctrl-C.

    Raises:
        MegaoptError: an option cannot be used as it is.
    """
    text = load_text(args.text)
    ranks = Ranks.current()
    interrupts = Interrupts()
    runs = [Run(recipe, text, ranks) for recipe in _recipes(args)]
    folders = [args.out / name for name in args.optimizers]
    checkpoints = [
        RunCheckpoint(folder, interrupts, every=args.save_every, before_last=True) for folder in folders
    ]
    if args.resume:
        require_checkpoint(folders)
        for run, checkpoint in zip(runs, checkpoints, strict=True):
            if checkpoint.path.exists():
                checkpoint.load(run)
    make_folder(args.out)
    if args.nproc > ranks.count:
        return launch("compare", args)
    with interrupts:
        return _compare(args, runs, folders, checkpoints)


def _compare(
    args: Namespace, runs: Sequence[Run], folders: Sequence[Path], checkpoints: Sequence[RunCheckpoint]
) -> int:
    """Train one after the other, and print and draw what came out."""
    threads = use_threads(args.threads, args.nproc)
    console = console_for_output()
    first = runs[0].ranks.is_first
    quiet = args.quiet or args.json
    if first and not quiet:
        print_text(console, runs[0].text)
    longest = max(len(name) for name in args.optimizers)
    try:
        results = [
            run_into(run, folder, console, threads, checkpoint, name_width=longest, quiet=quiet)
            for run, folder, checkpoint in zip(runs, folders, checkpoints, strict=True)
        ]
    except StoppedError as stopped:
        if first:
            print(f"megaopt: {stopped}", file=sys.stderr)
        return 130
    if first:
        _show(args, results, console, threads)
        for checkpoint in checkpoints:
            checkpoint.remove()
    return 0 if all(result.diverged_at is None for result in results) else 1


def _show(args: Namespace, results: Sequence[RunResult], console: Console, threads: int) -> None:
    """Draw and write the comparison, and print it as the options ask for it."""
    draw_comparison(results, args.out / "compare.png")
    record = comparison_record(results, threads)
    write_json(args.out / "compare.json", record)
    if args.json:
        print_json(record)
    else:
        _print_results(console, results, args.out)


def _print_results(console: Console, results: Sequence[RunResult], folder: Path) -> None:
    console.print()
    console.print(_table(results, console.width))
    if console.width < _WIDE:
        say(console, _shares(results))
    console.print(f"files  {folder}: compare.png, compare.json, and a folder for each run", markup=False)


def _recipes(args: Namespace) -> list[Recipe]:
    names: list[str] = args.optimizers
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CommandError(f"{', '.join(twice)}: named more than once")
    lrs = learning_rates(args.lr, names)
    settings = settings_by_target(args.assignments, names)
    return [recipe_of(args, name, lrs.get(name), settings[name]) for name in names]


def _table(results: Sequence[RunResult], width: int) -> Table:
    """Return the comparison in as many columns as there is room for; what is left out stands in `compare.json`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("optimizer", style="bold")
    if width >= _WIDE:
        table.add_column("from")
    table.add_column("lr", justify="right")
    table.add_column("held-out\nbits/byte", justify="right")
    parts = PARTS if width >= _MEDIUM else ()
    for part in parts:
        table.add_column(f"{part}\nms/step", justify="right")
    if not parts:
        table.add_column("all\nms/step", justify="right")
    if width >= _WIDE:
        table.add_column("elements stepped by")
    finite = [result.val_bits_per_byte for result in results if result.val_bits_per_byte is not None]
    for result in results:
        value = result.val_bits_per_byte
        shown = f"diverged at step {result.diverged_at}" if value is None else f"{value:.4f}"
        owner = get_registry().owner("optimizer", result.recipe.optimizer)
        times = [result.milliseconds[part] for part in parts] or [sum(result.milliseconds.values())]
        table.add_row(
            result.recipe.optimizer,
            *([f"{owner.distribution} {owner.version}"] if width >= _WIDE else []),
            f"{result.peak_lr:g}",
            f"[bold]{shown}[/bold]" if finite and value == min(finite) else shown,
            *(f"{time:.1f}" for time in times),
            *([_elements(result)] if width >= _WIDE else []),
        )
    return table


def _elements(result: RunResult) -> str:
    return ", ".join(f"{part.optimizer} {part.elements:,}" for part in result.report.parts)


def _shares(results: Sequence[RunResult]) -> str:
    """Return who steps how much, below a table that has no room for it."""
    shared = [result for result in results if len(result.report.parts) > 1]
    return "".join(f"{result.recipe.optimizer}: {_elements(result)} elements\n" for result in shared)
