"""`megaopt` without megaopt-tools lists what is installed; with it, it is the program."""

import sys
from types import SimpleNamespace

import pytest

from megaopt_core.__main__ import main


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line, to be filled; the program itself is not installed."""
    monkeypatch.setitem(sys.modules, "megaopt_tools", None)
    found = ["megaopt"]
    monkeypatch.setattr(sys, "argv", found)
    return found


@pytest.mark.usefixtures("arguments")
def test_without_the_program_plugins_and_optimizers_are_listed(plugins, capsys) -> None:
    """In plain text, with the command that brings the program."""
    plugins.install(
        "one",
        """
@hookimpl
def megaopt_optimizer_entries():
    return {"only": OptimizerEntry(torch.optim.SGD, description="the only one")}
""",
        version="3.2",
    )
    plugins.registry()
    assert main() == 0
    listed, brought, advice = capsys.readouterr().out.strip().split("\n\n")
    assert [line.split() for line in listed.splitlines()][3] == ["one", "megaopt-one", "3.2", "loaded"]
    assert brought.splitlines()[-1].split(maxsplit=3) == ["only", "megaopt-one", "3.2", "the only one"]
    assert advice.startswith("pip install megaopt-tools ")


def test_without_the_program_a_command_says_what_brings_it(arguments: list[str], capsys) -> None:
    """In one line, with the exit status of an error."""
    arguments += ["describe", "muon"]
    assert main() == 2
    assert capsys.readouterr().err == (
        "megaopt: error: `megaopt describe` comes with megaopt-tools, which is not installed: "
        "pip install megaopt-tools\n"
    )


def test_with_the_program_it_is_run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And its exit status is the process's."""
    arguments += ["anything"]
    monkeypatch.setitem(sys.modules, "megaopt_tools", SimpleNamespace(main=lambda: 7))
    assert main() == 7
