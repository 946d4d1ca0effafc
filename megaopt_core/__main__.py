"""`megaopt` and `python -m megaopt_core`: the program of megaopt-tools; without it, a list of what is installed."""

from __future__ import annotations

import sys

from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry._catalogue import TOOLS
from megaopt_core.registry._missing import import_distribution
from megaopt_core.registry._registry import get_registry
from megaopt_core.reporting._text_table import format_table

__all__ = ["main"]


def main() -> int:
    """Run the program where megaopt-tools is installed; else list plugins and optimizers, and name it.

    Returns:
        The exit status: 2 for a command that is not there.
    """
    arguments = sys.argv[1:]
    try:
        status: int = import_distribution(TOOLS, f"`megaopt {' '.join(arguments[:1])}`").main()
    except PluginNotInstalledError as error:
        if arguments:
            print(f"megaopt: error: {error}", file=sys.stderr)
            return 2
        print(_installed())
        return 0
    return status


def _installed() -> str:
    """Return the installed plugins and their optimizers as plain text."""
    registry = get_registry()
    optimizers = [
        (name, registry.owner("optimizer", name).source, entry.description)
        for name, entry in registry.optimizers().items()
    ]
    plugins = [
        (info.name, info.distribution or "-", info.version or "-", info.error or info.status.value)
        for info in registry.plugins()
    ]
    return "\n\n".join(
        [
            format_table(["plugin", "distribution", "version", "status"], plugins),
            format_table(["optimizer", "plugin", "description"], optimizers),
            f"pip install {TOOLS} brings the commands: explain, describe, train, compare and more",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
