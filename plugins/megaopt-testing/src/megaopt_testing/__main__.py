"""`python -m megaopt_testing NAME`: the conformance kit against an installed plugin, without the program `megaopt`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from megaopt_testing.check_plugin_command import add_options
from megaopt_testing.run_command import run_parsed


def main() -> int:
    """Check the plugin that the command line names; return the exit status."""
    parser = ArgumentParser(prog="python -m megaopt_testing", description=__doc__)
    add_options(parser)
    return run_parsed(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
