"""`megaopt calibrate`: measure this processor once, so that all runs on it choose the same way to compute."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from megaopt_core.plugin_api import Commands

__all__ = ["add_calibrate_command"]


def add_calibrate_command(commands: Commands) -> None:
    """Add `megaopt calibrate`.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    about = "measure how fast this processor multiplies, for the plans of Muon"
    parser = commands.add_parser(
        "calibrate",
        help=about,
        description=f"{about.capitalize()}.",
        epilog="examples:\n  megaopt calibrate\n  megaopt calibrate --threads 8 --output muon-rates.json",
    )
    parser.add_argument("--threads", type=int, help="number of threads; by default torch's own number")
    parser.add_argument(
        "--output",
        type=Path,
        help="file to write; by default MEGAOPT_CALIBRATION, or the user's cache folder",
    )
    parser.set_defaults(run=_run)


def _run(arguments: Namespace) -> int:
    import torch

    from megaopt_core.errors import ConfigurationError
    from megaopt_muon.choice.calibration import write_calibration

    before = torch.get_num_threads()
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise ConfigurationError(
                f"--threads {arguments.threads}: must be at least 1",
                setting="threads",
                value=arguments.threads,
            )
        torch.set_num_threads(arguments.threads)
    try:
        print(write_calibration(arguments.output))
    finally:
        torch.set_num_threads(before)
    return 0
