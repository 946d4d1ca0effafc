"""`megaopt check-plugin` runs the conformance kit and says what failed."""

import json
from functools import partial

import pytest
from megaopt_testing import CHECKS, Check, Kind, run_checks, run_command, suite
from megaopt_testing.fake_plugins import FakePlugins
from megaopt_testing.plugin import megaopt_commands

from megaopt_core.errors import ConformanceError, UnknownSettingError

main = partial(run_command, megaopt_commands)

pytestmark = pytest.mark.any_python

PLUGIN = """
@hookimpl
def megaopt_optimizer_entries():
    return {"adagrad": OptimizerEntry(torch.optim.Adagrad), "other": OptimizerEntry(torch.optim.Adagrad)}
"""


def holds(optimizer: str, **settings: object) -> None:
    """Holds for every optimizer."""


def adagrad_only(optimizer: str, **settings: object) -> None:
    """Does not hold for others."""
    if optimizer != "adagrad":
        raise ConformanceError(f"it is no adagrad, with lr={settings['lr']}", optimizer=optimizer)


def crashes(optimizer: str, **settings: object) -> None:
    """Meets something unexpected in others."""
    if optimizer != "adagrad":
        raise RuntimeError("no such kernel")


SHORT = (
    Check("first", "the first holds", holds),
    Check("second", "the second holds", adagrad_only, hint="look at its name"),
    Check("third", "the third can be made", holds, lambda entry: "it has no settings"),
    Check("fourth", "the fourth does not crash", crashes),
)


@pytest.fixture(autouse=True)
def _two(plugins: FakePlugins) -> None:
    plugins.install("two", PLUGIN)
    plugins.install("nothing")
    plugins.registry("testing")


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "CHECKS_OF", {**suite.CHECKS_OF, Kind.OPTIMIZER: SHORT})


@pytest.mark.usefixtures("_short")
def test_one_line_a_check(capsys) -> None:
    """With the reason below, where there is one; nothing failed, so exit status 0."""
    assert main(["check-plugin", "adagrad"]) == 0
    assert (
        capsys.readouterr().out
        == """\
adagrad (megaopt-two 1.0)
  passed  first                        0.0 s  the first holds
  passed  second                       0.0 s  the second holds
  skipped third                        0.0 s  the third can be made
          it has no settings
  passed  fourth                       0.0 s  the fourth does not crash

ran 3 of 4 checks, 0 failed, 1 skipped
"""
    )


@pytest.mark.usefixtures("_short")
def test_a_plugins_name_means_all_of_its_optimizers(capsys) -> None:
    """A failed check stops no other; exit status 1, and a traceback for what is no answer of the kit."""
    assert main(["check-plugin", "two", "--set", "lr=0.5"]) == 1
    printed = capsys.readouterr().out
    assert "  failed  second                       0.0 s  the second holds\n" in printed
    assert "          'other': it is no adagrad, with lr=0.5\n" in printed
    assert "          RuntimeError: no such kernel\n          Traceback (most recent call last):\n" in printed
    assert "          hint: look at its name\n" in printed
    assert printed.endswith("\n\nran 6 of 8 checks, 2 failed, 2 skipped\n")


@pytest.mark.usefixtures("_short")
def test_json(capsys) -> None:
    """The same for programs: what was checked with which versions, counted, and every result."""
    assert main(["check-plugin", "megaopt-two", "--set", "lr=0.5", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["plugin"] == {"name": "two", "distribution": "megaopt-two", "version": "1.0"}
    assert set(told["versions"]) == {"python", "megaopt-testing", "megaopt-core", "torch"}
    counts = {key: told[key] for key in ("checks", "ran", "skipped", "failed", "xfailed")}
    assert counts == {"checks": 8, "ran": 6, "skipped": 2, "failed": 2, "xfailed": 0}
    assert [(each["kind"], each["name"]) for each in told["subjects"]] == [
        ("optimizer", "adagrad"),
        ("optimizer", "other"),
    ]
    failed = [result for result in told["subjects"][1]["results"] if result["status"] == "failed"]
    assert [(result["id"], result["hint"]) for result in failed] == [
        ("second", "look at its name"),
        ("fourth", ""),
    ]


@pytest.mark.usefixtures("_short")
def test_what_is_known_to_fail(capsys) -> None:
    """A reason makes it no failure; without one, or of a check that holds, it is an error."""
    known = ["--xfail", "second=it is somebody else", "--xfail", "fourth=no kernel here"]
    assert main(["check-plugin", "other", "--set", "lr=0.5", *known]) == 0
    printed = capsys.readouterr().out
    assert "  xfailed second " in printed
    assert "          it is somebody else ('other': it is no adagrad, with lr=0.5)\n" in printed
    assert printed.endswith("ran 3 of 4 checks, 0 failed, 1 skipped, 2 failed as expected\n")
    assert main(["check-plugin", "adagrad", "--xfail", "second=it is somebody else"]) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "second was expected to fail (it is somebody else), but passes: remove the xfail" in told
    assert main(["check-plugin", "adagrad", "--xfail", "second"]) == 2
    assert "write it as CHECK=REASON" in capsys.readouterr().err
    assert main(["check-plugin", "adagrad", "--xfail", "sixth=why"]) == 2
    assert "--xfail sixth: no check of this name was made" in capsys.readouterr().err


@pytest.mark.usefixtures("_short")
def test_fewer_than_declared_is_a_failure(capsys) -> None:
    """A check that is skipped is not one that was made."""
    assert main(["check-plugin", "adagrad", "--at-least", "3"]) == 0
    assert main(["check-plugin", "adagrad", "--at-least", "4"]) == 1
    assert "at least 4 are declared" in capsys.readouterr().out


@pytest.mark.usefixtures("_short")
def test_a_badge(tmp_path, capsys) -> None:
    """A picture of how many hold, in the colour of the result."""
    assert main(["check-plugin", "adagrad", "--badge", str(tmp_path / "kit.svg")]) == 0
    assert "3 of 3 checks" in (tmp_path / "kit.svg").read_text()
    assert main(["check-plugin", "two", "--set", "lr=0.5", "--badge", str(tmp_path / "bad.svg")]) == 1
    bad = (tmp_path / "bad.svg").read_text()
    assert "4 of 6 checks" in bad
    assert "#c9302c" in bad


OFFERS = """
from megaopt_testing.strategies import Rows


@hookimpl
def megaopt_optimizer_entries():
    return {"adagrad3": OptimizerEntry(torch.optim.Adagrad)}


@hookimpl
def megaopt_sharding_strategies():
    return {"my_rows": Rows(name="my_rows")}


@hookimpl
def megaopt_schedules():
    return {"falls": ScheduleStyle(learning_rate=lambda point: point.between(1 - point.progress), description="falls")}


@hookimpl
def megaopt_annotate_params(model_chunk):
    return {}

@hookimpl
def megaopt_step_observers(optimizer):
    return []
"""


def test_all_that_a_plugin_offers_is_found(plugins, monkeypatch, capsys) -> None:
    """All kinds, among them what reads models and what watches steps; each by its own checks, and by its name."""
    plugins.install("all", OFFERS)
    plugins.registry("testing")
    first = {kind: checks[-1:] for kind, checks in suite.CHECKS_OF.items()}
    monkeypatch.setattr(suite, "CHECKS_OF", first)
    main(["check-plugin", "all", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert [(each["kind"], each["name"]) for each in told["subjects"]] == [
        ("optimizer", "adagrad3"),
        ("strategy", "my_rows"),
        ("schedule", "falls"),
        ("roles", "all"),
        ("observers", "all"),
    ]
    assert [each["results"][0]["id"] for each in told["subjects"]] == [
        checks[0].id for checks in first.values()
    ]
    for name, kind in (("my_rows", "strategy"), ("falls", "schedule")):
        main(["check-plugin", name, "--json"])
        assert [each["kind"] for each in json.loads(capsys.readouterr().out)["subjects"]] == [kind]


def test_settings_go_to_optimizers_alone(plugins, monkeypatch, capsys) -> None:
    """What else a plugin offers is checked without them; alone it takes none."""
    plugins.install("all", OFFERS)
    plugins.registry("testing")
    quick = {kind: [checks[-1]] for kind, checks in suite.CHECKS_OF.items()}
    monkeypatch.setattr(suite, "CHECKS_OF", quick)
    main(["check-plugin", "all", "--set", "lr=0.1", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert "TypeError" not in str(told)
    assert main(["check-plugin", "falls", "--set", "lr=0.1"]) == 2
    said = capsys.readouterr()
    assert said.err == "megaopt: error: --set lr: only the checks of optimizers take settings\n"
    assert said.out == ""


@pytest.mark.parametrize("wrong", ["lr=-1", "lrr=1"])
def test_a_wrong_setting_is_one_error_before_any_check(wrong: str, capsys) -> None:
    """Not a failure of every check, with a traceback each."""
    assert main(["check-plugin", "adagrad", "--set", wrong]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("megaopt: error: ")
    assert wrong.partition("=")[0] in said.err
    assert said.err.count("\n") == 1


def test_checks_of_a_schedule_take_no_settings() -> None:
    """From Python too; the error names the setting."""
    with pytest.raises(UnknownSettingError, match="lr: 'cosine' is a schedule, whose checks take no such"):
        run_checks("cosine", kind="schedule", lr=1.0)


def test_the_whole_kit_runs(capsys) -> None:
    """Every check of it, on an optimizer of torch's own."""
    main(["check-plugin", "adagrad", "--set", "lr=0.1", "--json"])
    (told,) = json.loads(capsys.readouterr().out)["subjects"]
    assert [result["id"] for result in told["results"]] == [check.id for check in CHECKS]


def test_there_is_nothing_to_check(capsys) -> None:
    """A plugin without optimizers, and a name that nobody knows."""
    assert main(["check-plugin", "nothing"]) == 2
    assert capsys.readouterr().err == (
        "megaopt: error: plugin 'nothing' (megaopt-nothing 1.0) offers no optimizer, strategy, "
        "schedule, reader of models or step observer: there is nothing to check\n"
    )
    assert main(["check-plugin", "adagrat"]) == 2
    assert "did you mean 'adagrad'?" in capsys.readouterr().err


@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("columns", [60, 80, 100, 140])
def test_lines_fit_the_screen(columns: int, capsys, monkeypatch) -> None:
    """What a check says goes below its line where it does not fit beside it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["check-plugin", "adagrad"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= columns
