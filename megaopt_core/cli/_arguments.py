"""The core's commands and their arguments; nothing here imports torch, so that wrong ones are answered at once."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from megaopt_core.cli._assignments import add_set_option
from megaopt_core.cli._parser import examples
from megaopt_core.registry._catalogue import EXAMPLES

if TYPE_CHECKING:
    from megaopt_core.plugin_api._commands import Commands

__all__ = ["add_core_commands"]


def add_core_commands(commands: Commands) -> None:
    """Add the commands that the core brings.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    _add_plugins(commands)
    _add_optimizers(commands)
    _add_describe(commands)
    _add_explain(commands)


def _add_plugins(commands: Commands) -> None:
    about = "list the installed plugins"
    parser = commands.add_parser(
        "plugins",
        help=about,
        description=f"{about.capitalize()}; none is imported.",
        epilog=examples(*EXAMPLES["plugins"]),
    )
    parser.add_argument(
        "--load", action="store_true", help="import them: what each provides, or why it is broken"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_plugins)


def _add_optimizers(commands: Commands) -> None:
    about = "list the optimizers that the installed plugins bring"
    parser = commands.add_parser(
        "optimizers",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(*EXAMPLES["optimizers"]),
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="show only those with this in their name, plugin or description",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_optimizers)


def _add_describe(commands: Commands) -> None:
    about = "explain every setting of an optimizer, or of the core"
    parser = commands.add_parser(
        "describe",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(*EXAMPLES["describe"]),
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="an optimizer, setting, schedule or sharding strategy; without it: a short list of what every run can set",
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="show only the settings with this in their name or meaning"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run_describe)


def _add_explain(commands: Commands) -> None:
    about = "show what each parameter of a model would get, and why"
    parser = commands.add_parser(
        "explain",
        help=about,
        description=f"{about.capitalize()}; nothing is trained.",
        epilog=examples(*EXAMPLES["explain"]),
    )
    parser.add_argument("factory", metavar="MODULE:FACTORY", help="function or class that makes the model")
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings and [[overrides]]")
    parser.add_argument("--optimizer", metavar="NAME", help="the optimizer; it wins over the file's")
    parser.add_argument("--lr", type=float, help="the learning rate; it wins over the file's")
    add_set_option(parser)
    parser.add_argument("--device", default="meta", help="where to make the model (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--all", action="store_true", help="a row for every parameter; otherwise repeated layers share one"
    )
    parser.add_argument(
        "--html", metavar="PAGE", help="write one self-contained page: a table and a map of the model"
    )
    parser.set_defaults(run=_run_explain)


def _run_plugins(args: Namespace) -> int:
    from megaopt_core.cli._plugins import run

    return run(args)


def _run_optimizers(args: Namespace) -> int:
    from megaopt_core.cli._optimizers import run

    return run(args)


def _run_describe(args: Namespace) -> int:
    from megaopt_core.cli._describe import run

    return run(args)


def _run_explain(args: Namespace) -> int:
    from megaopt_core.cli._explain import run

    return run(args)
