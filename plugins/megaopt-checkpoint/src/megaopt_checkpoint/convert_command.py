"""`megaopt convert`: a checkpoint as one file, and back."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megaopt_core.plugin_api import Commands

__all__ = ["add_command", "run"]

_SUFFIXES = (".safetensors", ".pt", ".pth")


def add_command(commands: Commands) -> None:
    """Add `megaopt convert`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "convert a checkpoint into one file, or such a file into a checkpoint"
    parser = commands.add_parser(
        "convert",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  megaopt convert runs/checkpoint model.safetensors\n"
        "  megaopt convert model.safetensors runs/checkpoint",
    )
    parser.add_argument("source", help="a checkpoint's folder, or a file that this command wrote")
    parser.add_argument(
        "destination", help="NAME.safetensors, NAME.pt (torch), or the folder to make of a file"
    )
    parser.add_argument("--force", action="store_true", help="replace a destination that exists")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Args:
        args: `source`, `destination`, `force`.

    Raises:
        CheckpointError: the destination exists, or a file that it names is of an unknown kind.
    """
    from megaopt_checkpoint import convert_checkpoint
    from megaopt_core.errors import CheckpointError

    destination = Path(args.destination)
    if Path(args.source).is_dir() and destination.suffix not in _SUFFIXES:
        raise CheckpointError(
            f"{destination}: the name must end with {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}",
            path=str(destination),
        )
    if not args.force and os.path.lexists(destination):
        raise CheckpointError(f"{destination} is already there; --force replaces it", path=str(destination))
    convert_checkpoint(args.source, args.destination)
    print(f"wrote {args.destination}")
    return 0
