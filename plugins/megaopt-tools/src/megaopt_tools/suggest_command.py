"""`megaopt suggest`: settings of Muon to begin with, from those that AdamW had; nothing here imports torch."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace

from megaopt_core.plugin_api import Commands
from megaopt_tools.cli.output import print_json
from megaopt_tools.cli.parser import examples
from megaopt_tools.errors import CommandError
from megaopt_tools.rates import MULTIPLE, UPDATE_RMS, Tuned, suggested_settings

__all__ = ["add_suggest_command"]

_SIZES = ("width", "batch")


def add_suggest_command(commands: Commands) -> None:
    """Add `megaopt suggest`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    parser = commands.add_parser(
        "suggest",
        help="suggest a learning rate for Muon, from AdamW's",
        description="Print settings of Muon to begin with, from the learning rate that AdamW had in the same script.",
        epilog=examples(
            "megaopt suggest --adamw-lr 3e-3",
            "megaopt suggest --adamw-lr 3e-4 --adamw-width 768 --width 1536",
            "megaopt suggest my_model.py:build --adamw-lr 3e-4 --adamw-batch 64 --batch 256",
        ),
    )
    parser.add_argument(
        "factory",
        nargs="?",
        metavar="MODULE:FACTORY",
        help="function or class that makes the model: shows who steps how much, and tells its width",
    )
    parser.add_argument(
        "--adamw-lr", type=_positive, required=True, metavar="LR", help="AdamW's learning rate"
    )
    parser.add_argument(
        "--weight-decay",
        type=_not_negative,
        default=0.1,
        metavar="DECAY",
        help="AdamW's weight decay (default: %(default)s)",
    )
    for name, meaning in (("width", "features of a token"), ("batch", "examples or tokens of a step")):
        parser.add_argument(f"--{name}", type=_positive, metavar="SIZE", help=f"{meaning} in the new run")
        parser.add_argument(
            f"--adamw-{name}",
            type=_positive,
            metavar="SIZE",
            help=f"the {name} that AdamW's rate was found at; default: the same",
        )
    parser.add_argument("--device", default="meta", help="where to make the model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the settings alone, as JSON")
    parser.set_defaults(run=_run)


def _run(args: Namespace) -> int:
    shown = None
    if args.factory is not None:
        from megaopt_tools.model_sizes import model_sizes

        shown = model_sizes(args.factory, args.device)
        if args.width is None and args.adamw_width is not None:
            args.width = shown.width
    ratios = {name: _ratio(args, name) for name in _SIZES}
    tuned = Tuned(args.adamw_lr, args.weight_decay, ratios["width"], ratios["batch"])
    settings = suggested_settings(tuned)
    if args.json:
        print_json(settings)
        return 0
    print(_text(tuned, settings))
    if shown is not None:
        print(f"\n{shown}")
    return 0


def _ratio(args: Namespace, name: str) -> float:
    new, old = getattr(args, name), getattr(args, f"adamw_{name}")
    if old is None:
        if new is not None:
            raise CommandError(f"--{name} {new:g}: give --adamw-{name} too, which AdamW's rate was found at")
        return 1.0
    if new is None:
        or_model = " or a model" if name == "width" else ""
        raise CommandError(f"--adamw-{name} {old:g}: give --{name}{or_model} too, which the new run has")
    return float(new / old)


def _text(tuned: Tuned, settings: dict[str, float]) -> str:
    lines = [
        "optimizer = build_optimizer(",
        "    model,",
        '    "muon",',
        *(f"    {name}={value:g}," for name, value in settings.items()),
        ")",
        "",
        f"Matrices take {MULTIPLE:g} times AdamW's rate, in steps of AdamW's size ({UPDATE_RMS:g}).",
        "Everything else keeps AdamW's rate and weight decay.",
    ]
    if not math.isclose(tuned.lr_here, tuned.lr):
        lines.append(
            f"AdamW's rate {tuned.lr:g} is taken as {tuned.lr_here:.3g} here: it falls with the width and grows with "
            "the root of the batch."
        )
    lines += [
        "A loop that sets the rate itself multiplies each group's own:",
        '    group["lr"] = group["max_lr"] * factor',
    ]
    return "\n".join(lines)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    return value if math.isfinite(value) else math.nan


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value
