"""The page about the command line describes every command."""

import re
from pathlib import Path

from megaopt_core.cli._program import CORE_COMMANDS

PAGE = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()


def test_every_command_is_documented() -> None:
    """In the order in which `megaopt --help` lists them."""
    assert re.findall(r"^\| `megaopt ([\w-]+)", PAGE, re.MULTILINE) == list(CORE_COMMANDS)
