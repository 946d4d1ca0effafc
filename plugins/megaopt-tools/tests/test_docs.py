"""The guide says what the commands do."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
from megaopt_tools.plugin import megaopt_commands

PAGE = Path(__file__).parents[3] / "docs" / "training.md"

if not PAGE.exists():
    pytest.skip("these tests run without the sources around them", allow_module_level=True)


def _options() -> dict[str, set[str]]:
    """The long options of every command of this plugin."""
    commands = ArgumentParser().add_subparsers()
    megaopt_commands(commands)
    return {
        name: {
            option
            for action in parser._actions
            for option in action.option_strings
            if option.startswith("--")
        }
        for name, parser in commands.choices.items()
    }


def test_every_option_is_documented() -> None:
    """In the table, which names no option that there is not."""
    documented = set(re.findall(r"^\| `(--[\w-]+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    options = _options()
    assert set(options) == {"train", "compare", "schedule", "completion"}
    assert documented == set.union(options["train"], options["compare"]) - {"--help"}


def test_every_field_of_run_json_is_documented(megaopt) -> None:
    """In the table, which names no field that there is not."""
    assert megaopt("train", "--optimizer", "adam", "--steps", "1", "--out", "out") == 0
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(json.loads(Path("out/run.json").read_text()))
