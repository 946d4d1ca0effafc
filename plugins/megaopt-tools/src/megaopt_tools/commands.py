"""The commands `train` and `compare` and their arguments; nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megaopt_core.plugin_api import Commands
from megaopt_tools.cli.arguments import add_set_option
from megaopt_tools.cli.parser import examples
from megaopt_tools.options import add_run_options

__all__ = ["add_compare_command", "add_train_command"]


def add_train_command(commands: Commands) -> None:
    """Add `megaopt train`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    about = "train a small GPT on a text with one optimizer"
    parser = commands.add_parser(
        "train",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples(
            "megaopt train",
            "megaopt train --optimizer adam --lr 3e-3 --steps 100 --text my_text.txt",
            "megaopt train --optimizer muon --set muon_momentum=0.9 --out runs/slower",
            "megaopt train --steps 2000 --save-every 100 --out runs/long",
            "megaopt train --nproc 2 --sharding layer_wise",
        ),
    )
    parser.add_argument(
        "--optimizer", default="muon", metavar="NAME", help="a registered name; default: %(default)s"
    )
    parser.add_argument("--lr", type=float, help="peak learning rate; default: the result of the grid search")
    add_set_option(parser)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the files; default: runs/NAME")
    add_run_options(parser)
    parser.set_defaults(run=_run_train)


def add_compare_command(commands: Commands) -> None:
    """Add `megaopt compare`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    about = "train the same small GPT on the same batches with several optimizers"
    parser = commands.add_parser(
        "compare",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=examples(
            "megaopt compare adam muon",
            "megaopt compare adam muon --steps 100 --lr adam=3e-3 --lr muon=0.01",
            "megaopt compare muon soap --set muon:muon_nesterov=false",
        ),
    )
    parser.add_argument(
        "optimizers", nargs="+", metavar="NAME", help="registered names; `megaopt optimizers` lists them"
    )
    parser.add_argument(
        "--lr",
        action="append",
        default=[],
        metavar="[NAME=]LR",
        help="peak learning rate of one optimizer, or of all; may be repeated; default: the result of the grid search",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="[NAME:]FIELD=VALUE",
        help="set a field of the configuration of one optimizer, or of all; may be repeated",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=Path("runs/compare"),
        help="folder for the files; default: %(default)s",
    )
    add_run_options(parser)
    parser.set_defaults(run=_run_compare)


def _run_train(args: Namespace) -> int:
    from megaopt_tools.train_command import run_train

    return run_train(args)


def _run_compare(args: Namespace) -> int:
    from megaopt_tools.compare_command import run_compare

    return run_compare(args)
