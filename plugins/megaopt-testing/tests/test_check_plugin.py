"""`megaopt check-plugin` runs the conformance kit and says what failed."""

import json

import pytest
from megaopt_testing import CHECKS, BoundCheck, Check, suite

from megaopt_core.cli import main
from megaopt_core.errors import ConformanceError

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
    Check("second", "the second holds", adagrad_only),
    Check("third", "the third can be made", holds, lambda entry: "it has no settings"),
    Check("fourth", "the fourth does not crash", crashes),
)


@pytest.fixture(autouse=True)
def _two(plugins) -> None:
    plugins.install("two", PLUGIN)
    plugins.install("nothing")
    plugins.registry("testing")


@pytest.fixture
def _short(monkeypatch) -> None:
    def bound(optimizer: str, settings: dict[str, object]) -> list[BoundCheck]:
        return [BoundCheck(check, optimizer, settings) for check in SHORT]

    monkeypatch.setattr(suite, "bound_checks", bound)


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

4 checks, 0 failed
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
    assert printed.endswith("\n\n8 checks, 2 failed\n")


@pytest.mark.usefixtures("_short")
def test_json(capsys) -> None:
    """The same for programs."""
    assert main(["check-plugin", "megaopt-two", "--set", "lr=0.5", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert [(result["optimizer"], result["id"]) for result in results if result["status"] == "failed"] == [
        ("other", "second"),
        ("other", "fourth"),
    ]


def test_the_whole_kit_runs(capsys) -> None:
    """Every check of it, on an optimizer of torch's own."""
    main(["check-plugin", "adagrad", "--set", "lr=0.1", "--json"])
    results = json.loads(capsys.readouterr().out)
    assert [result["id"] for result in results] == [check.id for check in CHECKS]


def test_there_is_nothing_to_check(capsys) -> None:
    """A plugin without optimizers, and a name that nobody knows."""
    assert main(["check-plugin", "nothing"]) == 2
    assert capsys.readouterr().err == (
        "megaopt: error: plugin 'nothing' (megaopt-nothing 1.0) offers no optimizer: there is nothing to check\n"
    )
    assert main(["check-plugin", "adagrat"]) == 2
    assert "did you mean 'adagrad'?" in capsys.readouterr().err
