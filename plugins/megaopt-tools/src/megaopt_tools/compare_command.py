"""`megaopt compare`: train the same GPT with several optimizers."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table

from megaopt_core import get_registry
from megaopt_tools.console import console_for_output, print_text, say
from megaopt_tools.errors import CommandError, StoppedError
from megaopt_tools.options import recipe_of, use_threads
from megaopt_tools.pictures import draw_comparison
from megaopt_tools.recipe import Recipe
from megaopt_tools.records import comparison_record, write_json
from megaopt_tools.running import make_folder, run_into
from megaopt_tools.targets import learning_rates, settings_by_target
from megaopt_tools.text import load_text
from megaopt_tools.training import PARTS, Run, RunResult

__all__ = ["run_compare"]


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
    runs = [Run(recipe, text) for recipe in _recipes(args)]
    make_folder(args.out)
    threads = use_threads(args.threads)
    console = console_for_output()
    print_text(console, text)
    try:
        results = [run_into(run, args.out / run.recipe.optimizer, console, threads) for run in runs]
    except StoppedError as stopped:
        print(f"megaopt: {stopped}", file=sys.stderr)
        return 130
    draw_comparison(results, args.out / "compare.png")
    write_json(args.out / "compare.json", comparison_record(results, threads))
    console.print()
    console.print(_table(results))
    say(console, f"files  {args.out}: compare.png, compare.json, and a folder for each run")
    return 0 if all(result.diverged_at is None for result in results) else 1


def _recipes(args: Namespace) -> list[Recipe]:
    names: list[str] = args.optimizers
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise CommandError(f"{', '.join(twice)}: named more than once")
    lrs = learning_rates(args.lr, names)
    settings = settings_by_target(args.assignments, names)
    return [recipe_of(args, name, lrs.get(name), settings[name]) for name in names]


def _table(results: Sequence[RunResult]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("optimizer", style="bold")
    table.add_column("from")
    table.add_column("lr", justify="right")
    table.add_column("held-out\nbits/byte", justify="right")
    for part in PARTS:
        table.add_column(f"{part}\nms/step", justify="right")
    table.add_column("elements stepped by")
    finite = [result.val_bits_per_byte for result in results if result.val_bits_per_byte is not None]
    for result in results:
        value = result.val_bits_per_byte
        shown = f"diverged at step {result.diverged_at}" if value is None else f"{value:.4f}"
        owner = get_registry().owner("optimizer", result.recipe.optimizer)
        table.add_row(
            result.recipe.optimizer,
            f"{owner.distribution} {owner.version}",
            f"{result.peak_lr:g}",
            f"[bold]{shown}[/bold]" if finite and value == min(finite) else shown,
            *(f"{result.milliseconds[part]:.1f}" for part in PARTS),
            ", ".join(f"{part.optimizer} {part.elements:,}" for part in result.report.parts),
        )
    return table
