"""The command `megaopt`: one module for each of its commands."""

from megaopt_core.cli.program import main

__all__ = ["main"]
