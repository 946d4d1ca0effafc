"""The page about the command line describes every command."""

import re
from pathlib import Path

from megaopt_core.cli._program import CORE_COMMANDS
from megaopt_core.registry._catalogue import COMMANDS

PAGE = (Path(__file__).parents[3] / "docs" / "command-line.md").read_text()


def test_every_command_is_documented() -> None:
    """The core's first, in the order in which `megaopt --help` lists them, then those of our other distributions."""
    documented = re.findall(r"^\| `megaopt ([\w-]+)", PAGE, re.MULTILINE)
    assert documented[: len(CORE_COMMANDS)] == list(CORE_COMMANDS)
    assert set(documented[len(CORE_COMMANDS) :]) == set(COMMANDS)
