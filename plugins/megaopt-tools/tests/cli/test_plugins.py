"""`megaopt plugins` lists without importing; `--load` says what each provides or why it is broken."""

import json

import pytest
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_tools import main

GOOD = """
@hookimpl
def megaopt_optimizer_entries():
    return {"plain": OptimizerEntry(torch.optim.SGD)}

@hookimpl
def megaopt_commands(commands):
    commands.add_parser("greet")

@hookimpl
def megaopt_param_overrides(config, model_chunks):
    return {}
"""


@pytest.fixture
def three(plugins: FakePlugins, monkeypatch: pytest.MonkeyPatch) -> FakePlugins:
    """One that works, one that does not, one that is blocked."""
    monkeypatch.setenv("COLUMNS", "120")
    plugins.install("good", GOOD, version="1.2")
    plugins.install("bad", "1 / 0")
    plugins.install("blocked", "raise SystemExit('imported')")
    plugins.registry(MEGAOPT_DISABLE_PLUGINS="blocked")
    return plugins


@pytest.mark.usefixtures("three")
def test_the_list_imports_nothing(capsys) -> None:
    """Name, distribution, version, blocked or not."""
    assert main(["plugins"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["plugin", "distribution", "version", "status", "module"]
    assert lines[2][:4] == ["core", "-", "-", "available"]
    assert lines[3][:4] == ["bad", "megaopt-bad", "1.0", "available"]
    assert lines[4][:4] == ["blocked", "megaopt-blocked", "1.0", "blocked"]
    assert " ".join(lines[4][4:]) == "MEGAOPT_DISABLE_PLUGINS=blocked blocks it"
    assert lines[5][:4] == ["good", "megaopt-good", "1.2", "available"]


@pytest.mark.usefixtures("three")
def test_load_shows_what_each_provides_or_why_it_is_broken(capsys) -> None:
    """With the traceback below the table, and nothing on the error stream."""
    assert main(["plugins", "--load"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert (
        "loaded   optimizers: plain; commands: greet; other hooks: megaopt_param_overrides\n" in captured.out
    )
    assert "broken   ZeroDivisionError: division by zero\n" in captured.out
    assert "\nbad failed to load:\n\nTraceback (most recent call last):\n" in captured.out
    assert captured.out.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.usefixtures("three")
def test_json(capsys) -> None:
    """The same for programs."""
    assert main(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(plugin["name"], plugin["status"]) for plugin in listed] == [
        ("core", "available"),
        ("bad", "available"),
        ("blocked", "blocked"),
        ("good", "available"),
    ]
    assert main(["plugins", "--load", "--json"]) == 0
    loaded = {plugin["name"]: plugin for plugin in json.loads(capsys.readouterr().out)}
    assert loaded["good"]["provides"]["optimizers"] == ["plain"]
    assert loaded["bad"]["error"] == "ZeroDivisionError: division by zero"
    assert loaded["bad"]["traceback"].startswith("Traceback")
    assert "provides" not in loaded["bad"]


LOUD = """
print("imported")

@hookimpl
def megaopt_commands(commands):
    print("asked for commands")

@hookimpl
def megaopt_optimizer_entries():
    print("asked for optimizers")
    return {"plain": OptimizerEntry(torch.optim.SGD)}
"""


@pytest.mark.parametrize(
    "command", [["plugins", "--load"], ["optimizers"], ["describe", "plain"]], ids=lambda words: words[0]
)
def test_what_plugins_print_while_they_load_is_not_among_the_json(plugins, capsys, command) -> None:
    """It is on the error stream."""
    plugins.install("loud", LOUD)
    plugins.registry()
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert sorted(captured.err.splitlines()) == ["asked for commands", "asked for optimizers", "imported"]


def test_a_name_in_vain_is_told(plugins, capsys) -> None:
    """A misspelt name blocks nothing, and a name of the other variable's list lets nothing in."""
    plugins.install("good", GOOD)
    plugins.registry(MEGAOPT_DISABLE_PLUGINS="godo, ,", MEGAOPT_PLUGINS="good;other,good,core")
    assert main(["plugins"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "megaopt: warning: MEGAOPT_DISABLE_PLUGINS names 'godo', and no installed plugin goes by that",
        "megaopt: warning: MEGAOPT_PLUGINS names 'good;other', and no installed plugin goes by that",
    ]


def test_a_conflict_is_shown_below_the_table(plugins, capsys) -> None:
    """The table tells who provides what, the error what to do."""
    plugins.install("first", GOOD)
    plugins.install("second", GOOD)
    plugins.registry()
    assert main(["plugins", "--load"]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("optimizers: plain") == 2
    assert captured.err.startswith(
        "megaopt: error: optimizer 'plain' is given by plugin 'first' (megaopt-first 1.0)"
    )


def test_in_a_process(plugins) -> None:
    """The real environment, and no plugin imported."""
    plugins.install("loud", "print('imported')")
    code = "import sys; from megaopt_tools import main; sys.exit(main(sys.argv[1:] or ['plugins']))"
    done = plugins.python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "imported" not in done.stdout
    assert "loud" in done.stdout
    blocked = plugins.python(code, MEGAOPT_PLUGINS="other")
    assert "MEGAOPT_PLUGINS=other leaves it out" in blocked.stdout
