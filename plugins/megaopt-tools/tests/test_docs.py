"""The guide says what the commands do."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, _SubParsersAction
from pathlib import Path
from types import SimpleNamespace

import pytest
from megaopt_tools.cli.arguments import OWN_COMMANDS
from megaopt_tools.cli.program import COMMANDS, build_parser
from megaopt_tools.compare_command import _print_results
from megaopt_tools.console import console_for_output
from megaopt_tools.plugin import megaopt_commands
from megaopt_tools.training import PARTS

PAGE = Path(__file__).parents[3] / "docs" / "training.md"
COMMANDS_PAGE = PAGE.with_name("command-line.md")

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
    assert set(options) == {"train", "compare", "suggest", "schedule", "completion"}
    assert documented == set.union(options["train"], options["compare"]) - {"--help"}


def test_every_field_of_run_json_is_documented(megaopt) -> None:
    """In the table, which names no field that there is not."""
    assert megaopt("train", "--optimizer", "adam", "--steps", "1", "--out", "out") == 0
    rows = re.findall(r"^\| ((?:`\w+`,? ?)+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(json.loads(Path("out/run.json").read_text()))


def _shown_results(table: str) -> list[SimpleNamespace]:
    """Return the results that a printed table shows, as the command has them."""
    found = []
    rows = re.sub(r",\n +", ", ", table)  # the last column may go on below
    for line in rows.splitlines():
        row = re.match(
            r" +(\w+) +megaopt-\w+ \S+ +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)   (.+)$", line
        )
        if row is None:
            continue
        name, lr, value, *times, shares = row.groups()
        parts = [share.split() for share in re.findall(r"\w+ [\d,]+(?=, |$| *$)", shares)]
        report = SimpleNamespace(
            parts=[
                SimpleNamespace(optimizer=part, elements=int(count.replace(",", ""))) for part, count in parts
            ]
        )
        found.append(
            SimpleNamespace(
                recipe=SimpleNamespace(optimizer=name),
                peak_lr=float(lr),
                val_bits_per_byte=float(value),
                diverged_at=None,
                milliseconds=dict(zip(PARTS, map(float, times), strict=True)),
                report=report,
            )
        )
    return found


def test_the_table_of_the_guide_is_what_the_command_prints_today(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its numbers are of a long run; columns, spaces and words are compared."""
    for needed in ("megaopt_adam", "megaopt_lion", "megaopt_muon", "megaopt_soap"):
        pytest.importorskip(needed)
    monkeypatch.delenv("COLUMNS", raising=False)
    (shown,) = re.findall(
        r"^sha256 .*?\n\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    results = _shown_results(shown)
    assert [result.recipe.optimizer for result in results] == [
        "adam",
        "muon",
        "soap",
        "lion",
        "adaptive_muon",
    ]
    _print_results(console_for_output(), results, Path("demo"))  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in shown.strip().splitlines()] == [
        line.rstrip() for line in printed.strip().splitlines()
    ]


def test_every_command_is_documented() -> None:
    """The program's own first, in the order in which `megaopt --help` lists them, then those of plugins."""
    documented = re.findall(r"^\| `megaopt ([\w-]+)", COMMANDS_PAGE.read_text(), re.MULTILINE)
    assert documented[: len(OWN_COMMANDS)] == list(OWN_COMMANDS)
    assert set(documented[len(OWN_COMMANDS) :]) == set(COMMANDS)


def test_every_command_is_in_the_documentation() -> None:
    """A page, or the README of the plugin that brings it, shows `megaopt NAME`."""
    readmes = PAGE.parents[1].glob("plugins/*/README.md")
    pages = "\n".join(path.read_text() for path in [*PAGE.parent.glob("*.md"), *readmes])
    (commands,) = [action for action in build_parser()._actions if isinstance(action, _SubParsersAction)]
    assert set(commands.choices) >= set(OWN_COMMANDS)
    assert [name for name in commands.choices if not re.search(rf"megaopt {name}\b", pages)] == []
