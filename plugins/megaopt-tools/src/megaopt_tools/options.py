"""What `train` and `compare` have in common on the command line."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaopt_tools.errors import CommandError
from megaopt_tools.recipe import Recipe, tuned

__all__ = ["add_run_options", "recipe_of", "use_threads"]

_DEFAULT = Recipe("")

_SEEDS = (-(2**63), 2**64 - 1)
"""What torch takes as a seed."""

_MOST = 2**31 - 1
"""What torch takes as a number of threads; no run has more of anything else."""


def add_run_options(parser: ArgumentParser) -> None:
    """Add the options that describe a run, whatever its optimizer.

    Args:
        parser: the command's parser.
    """
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")
    output.add_argument(
        "--quiet", action="store_true", help="print only the result, without report and progress"
    )
    text = parser.add_argument_group("the text and the model")
    text.add_argument(
        "--text", type=Path, metavar="FILE", help="train on this file; default: Python's help topics"
    )
    text.add_argument(
        "--context",
        type=_positive,
        default=_DEFAULT.context,
        metavar="BYTES",
        help=_help("bytes in a window"),
    )
    text.add_argument("--seed", type=_seed, default=_DEFAULT.seed, help=_help("seed of weights and batches"))
    run = parser.add_argument_group("the run")
    run.add_argument("--steps", type=_positive, default=_DEFAULT.steps, help=_help("number of steps"))
    run.add_argument(
        "--batch-size", type=_positive, default=_DEFAULT.batch_size, help=_help("windows in a batch")
    )
    run.add_argument(
        "--schedule",
        default=_DEFAULT.schedule,
        metavar="STYLE",
        help=_help(
            "style of the learning rate's decay: constant, linear, cosine, inverse-square-root, WSD or a plugin's"
        ),
    )
    run.add_argument(
        "--warmup", type=_not_negative, metavar="STEPS", help="steps of warm-up; default: a tenth"
    )
    run.add_argument(
        "--threads",
        type=_positive,
        help="number of torch's threads on each rank; default: torch's choice, shared by the ranks",
    )
    _add_ways_to_run(parser)


def _add_ways_to_run(parser: ArgumentParser) -> None:
    """Add the options for a run that goes on later, or in several processes."""
    keep = parser.add_argument_group("to go on later")
    keep.add_argument(
        "--save-every",
        type=_positive,
        metavar="STEPS",
        help="save a checkpoint every so many steps; Ctrl-C saves one in any case",
    )
    keep.add_argument(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out; give the options that began the run",
    )
    ranks = parser.add_argument_group("several processes")
    ranks.add_argument(
        "--nproc",
        type=_positive,
        default=1,
        metavar="RANKS",
        help=_help("processes that share each batch, on this machine"),
    )
    ranks.add_argument(
        "--sharding",
        metavar="STRATEGY",
        help="how they share the optimizer's work: distributed, layer_wise, fsdp or a plugin's; "
        "default: each steps everything",
    )


def recipe_of(args: Namespace, optimizer: str, lr: float | None, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe that the options describe.

    What the options leave open, the grid search fills in, if it included the optimizer.

    Args:
        args: the parsed options.
        optimizer: a registered name.
        lr: the learning rate that was given.
        settings: the settings that were given.
    """
    found = tuned(optimizer)
    settings = {**found.settings, **settings}
    sharding = settings.get("sharding", args.sharding)
    if args.sharding is not None and sharding != args.sharding:
        raise CommandError(f"--set sharding={sharding}: the strategy is already {args.sharding}")
    if sharding is not None:
        settings["sharding"] = sharding
    if args.batch_size % args.nproc:
        raise CommandError(
            f"--batch-size {args.batch_size}: must be a multiple of --nproc {args.nproc}, for the ranks share "
            "each batch"
        )
    given_lr = settings.pop("lr", None)
    named = settings.pop("optimizer", optimizer)
    if named != optimizer:
        raise CommandError(f"--set optimizer={named}: the optimizer is already {optimizer}")
    if lr is not None and given_lr is not None and given_lr != lr:
        raise CommandError(f"--set lr={given_lr}: the learning rate is already {lr}")
    lr = given_lr if lr is None else lr
    optional = {} if args.warmup is None else {"warmup": args.warmup}
    return Recipe(
        optimizer=optimizer,
        lr=found.lr if lr is None else lr,
        settings=settings,
        steps=args.steps,
        batch_size=args.batch_size,
        context=args.context,
        schedule=args.schedule,
        seed=args.seed,
        **optional,
    )


def use_threads(count: int | None, ranks: int = 1) -> int:
    """Let torch compute with this many threads.

    Args:
        count: how many; None: torch's choice, shared by the ranks.
        ranks: how many processes compute on this machine.

    Returns:
        How many there are now.
    """
    import torch

    if count is None and ranks > 1:
        count = max(1, torch.get_num_threads() // ranks)
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def _help(about: str) -> str:
    return f"{about}; default: %(default)s"


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _seed(text: str) -> int:
    least, most = _SEEDS
    if text.removeprefix("-").isdecimal() and least <= int(text) <= most:
        return int(text)
    raise ArgumentTypeError(f"must be a whole number from {least} to {most}, got {text!r}")


def _whole(text: str, least: int) -> int:
    if not (text.isdecimal() and int(text) >= least):
        raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    if int(text) > _MOST:
        raise ArgumentTypeError(f"must be a whole number of at most {_MOST}, got {text!r}")
    return int(text)
