"""`megaopt convert`: a checkpoint as one file, and back."""

from __future__ import annotations

import argparse

from megaopt_core.cli import examples
from megaopt_core.plugin_api import Commands

__all__ = ["add_command", "run"]


def add_command(commands: Commands) -> None:
    """Add `megaopt convert`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "turn a checkpoint into one file, or such a file into a checkpoint"
    parser = commands.add_parser(
        "convert",
        help=about,
        description=f"{about.capitalize()}.",
        epilog=examples(
            "megaopt convert runs/checkpoint model.safetensors",
            "megaopt convert model.safetensors runs/checkpoint",
        ),
    )
    parser.add_argument("source", help="a checkpoint's folder, or a file that this command wrote")
    parser.add_argument(
        "destination", help="NAME.safetensors, NAME.pt (torch), or the folder to make of a file"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Args:
        args: `source`, `destination`.
    """
    from megaopt_checkpoint import convert_checkpoint

    convert_checkpoint(args.source, args.destination)
    print(f"wrote {args.destination}")
    return 0
