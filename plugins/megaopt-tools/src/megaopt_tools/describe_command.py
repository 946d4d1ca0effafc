"""`megaopt describe` and its arguments; nothing here imports torch."""

from __future__ import annotations

from argparse import Namespace

from megaopt_core.cli import examples
from megaopt_core.plugin_api import Commands

__all__ = ["add_describe_command"]


def add_describe_command(commands: Commands) -> None:
    """Add `megaopt describe`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    about = "explain every setting of an optimizer, or of the core"
    parser = commands.add_parser(
        "describe",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(
            "megaopt describe",
            "megaopt describe clip_grad",
            "megaopt describe muon",
            "megaopt describe muon momentum",
        ),
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
    parser.set_defaults(run=_run)


def _run(args: Namespace) -> int:
    from megaopt_tools.describing import run_describe

    return run_describe(args)
