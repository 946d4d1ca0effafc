"""`megaopt schedule`: draw a schedule before training with it."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from megaopt_core.plugin_api import Commands
from megaopt_tools.cli.parser import examples

__all__ = ["add_schedule_arguments", "add_schedule_command"]


def add_schedule_command(commands: Commands) -> None:
    """Add `megaopt schedule`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    about = "draw learning rate and weight decay over the steps"
    parser = commands.add_parser(
        "schedule",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(
            "megaopt schedule --lr 3e-4 --warmup-steps 100 --decay-steps 2000",
            "megaopt schedule --style WSD --wsd-decay-steps 200 --png schedule.png",
        ),
    )
    add_schedule_arguments(parser)
    parser.set_defaults(run=_run)


def _run(args: Namespace) -> int:
    from megaopt_tools.schedule_chart import run_schedule

    return run_schedule(args)


def _whole_from(least: int) -> Any:
    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from None
        if number < least:
            raise ArgumentTypeError(f"{number} is below {least}")
        return number

    return convert


def add_schedule_arguments(parser: ArgumentParser) -> None:
    """Add the options of a schedule and of its drawing.

    Args:
        parser: the parser of the command; `run_schedule` takes what it parses.
    """
    steps = _whole_from(0)
    lr = parser.add_argument_group("learning rate")
    lr.add_argument("--lr", type=float, default=1e-3, metavar="LR", help="maximum (default: %(default)s)")
    lr.add_argument(
        "--min-lr", type=float, default=0.0, metavar="LR", help="at the end of the decay (default: 0)"
    )
    lr.add_argument(
        "--init-lr", type=float, default=0.0, metavar="LR", help="at the beginning of warm-up (default: 0)"
    )
    lr.add_argument(
        "--warmup-steps", type=steps, default=0, metavar="N", help="length of warm-up (default: 0)"
    )
    lr.add_argument(
        "--decay-steps",
        type=steps,
        default=1000,
        metavar="N",
        help="step at which the decay ends, counted from step 0 (default: %(default)s)",
    )
    lr.add_argument(
        "--style",
        default="cosine",
        help="constant, linear, cosine, inverse-square-root, WSD or a plugin's style (default: %(default)s)",
    )
    lr.add_argument(
        "--style-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the style itself (megaopt describe STYLE lists them); may be repeated",
    )
    lr.add_argument("--wsd-decay-steps", type=steps, metavar="N", help="WSD: length of the final decay")
    lr.add_argument(
        "--wsd-style",
        metavar="STYLE",
        help="WSD: linear, cosine, exponential or minus_sqrt (default: exponential)",
    )
    wd = parser.add_argument_group("weight decay")
    wd.add_argument("--wd", type=float, default=0.0, metavar="WD", help="at step 0 (default: 0)")
    wd.add_argument("--end-wd", type=float, metavar="WD", help="at the end (default: as --wd)")
    wd.add_argument(
        "--wd-steps", type=steps, metavar="N", help="steps from --wd to --end-wd (default: as --decay-steps)"
    )
    wd.add_argument(
        "--wd-style",
        help="constant, linear, cosine or a plugin's style (default: constant, or linear if --end-wd is given)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--points",
        type=_whole_from(2),
        default=11,
        metavar="N",
        help="rows of numbers (default: %(default)s)",
    )
    output.add_argument("--json", action="store_true", help="print settings and numbers as JSON")
    output.add_argument("--png", metavar="FILE", help="also draw a picture (needs megaopt-tools)")
