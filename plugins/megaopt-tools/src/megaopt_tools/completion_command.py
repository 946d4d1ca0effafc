"""`megaopt completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import importlib
from argparse import Namespace

from megaopt_core.plugin_api import Commands
from megaopt_tools.cli.parser import examples

__all__ = ["add_completion_command"]

_SHELLS = ("bash", "zsh", "tcsh")


def add_completion_command(commands: Commands) -> None:
    """Add `megaopt completion`.

    Args:
        commands: what the hook `megaopt_commands` is given.
    """
    about = "print a script that lets a shell complete commands and options"
    parser = commands.add_parser(
        "completion",
        help=about,
        description=f"{about[0].upper()}{about[1:]}, those of plugins among them.",
        epilog=examples(
            'eval "$(megaopt completion bash)"',
            "megaopt completion zsh > ~/.zfunc/_megaopt",
        ),
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(run=_run)


def _run(args: Namespace) -> int:
    from megaopt_tools.cli.program import build_parser

    shtab = importlib.import_module("shtab")  # for this command alone
    print(shtab.complete(build_parser(), args.shell))
    return 0
