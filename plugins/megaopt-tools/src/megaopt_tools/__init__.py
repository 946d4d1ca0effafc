"""The program `megaopt`, files that hold a run, and advice on names that others use.

Public names are imported when they are first used: showing the help of a command needs no torch.
"""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_tools.cli.program import build_parser, main
    from megaopt_tools.run_file import RunFile, read_config

__all__ = ["RunFile", "build_parser", "main", "read_config"]

_HOME = {
    "RunFile": "run_file",
    "build_parser": "cli.program",
    "main": "cli.program",
    "read_config": "run_file",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
