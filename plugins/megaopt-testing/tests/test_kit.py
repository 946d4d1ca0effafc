"""Checks, their results, the pytest decorator, and plugins that are there for a test only."""

import unittest
from typing import Any

import pytest
import torch
from megaopt_testing import (
    CHECKS,
    BoundCheck,
    Check,
    CheckStatus,
    parametrize_with_checks,
    run_checks,
    temporary_plugin,
)

from megaopt_core import OptimizerEntry, get_registry, hookimpl
from megaopt_core.errors import ConformanceError, DuplicateNameError, PluginError, UnknownNameError


class Plugin:
    megaopt_api = "1"

    def __init__(self, *names: str) -> None:
        self.names = names

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        return {name: OptimizerEntry(torch.optim.Adagrad) for name in self.names}


def _passes(optimizer: str, **settings: Any) -> None:
    assert settings == {"lr": 0.5}


def _fails(optimizer: str, **settings: Any) -> None:
    raise ConformanceError("too slow", optimizer=optimizer)


def _breaks(optimizer: str, **settings: Any) -> None:
    raise ZeroDivisionError("division by zero")


PASSES, FAILS = Check("passes", "it holds", _passes), Check("fails", "it does not", _fails)
BREAKS = Check("breaks", "it raises", _breaks)
SKIPS = Check(
    "skips", "it cannot be made", _fails, lambda entry: f"{entry.optimizer_cls.__name__} has no such thing"
)


def test_run_checks_tells_of_every_check_what_came_of_it() -> None:
    """A failure, an error and a skip stop no other check, and each says why."""
    with temporary_plugin(Plugin("mine")):
        results = run_checks("mine", checks=[BREAKS, FAILS, SKIPS, PASSES], lr=0.5)
    assert [(result.id, result.status, result.message, result.ok) for result in results] == [
        ("breaks", CheckStatus.FAILED, "ZeroDivisionError: division by zero", False),
        ("fails", CheckStatus.FAILED, "'mine': too slow", False),
        ("skips", CheckStatus.SKIPPED, "Adagrad has no such thing", True),
        ("passes", CheckStatus.PASSED, "", True),
    ]
    assert "ZeroDivisionError" in results[0].traceback
    assert results[1].traceback == ""


def test_run_checks_of_an_unknown_optimizer_raises() -> None:
    """A misspelt name is no list of failures."""
    with (
        temporary_plugin(Plugin("mine")),
        pytest.raises(UnknownNameError, match=r"'mien'.*did you mean 'mine'"),
    ):
        run_checks("mien")


def test_a_bound_check_raises_or_skips_in_a_test() -> None:
    """Test runners see a failure as a failure and a skip as a skip."""
    with temporary_plugin(Plugin("mine")):
        BoundCheck(PASSES, "mine", {"lr": 0.5})()
        with pytest.raises(ConformanceError, match="'mine': too slow") as raised:
            BoundCheck(FAILS, "mine")()
        with pytest.raises(unittest.SkipTest, match="Adagrad has no such thing"):
            BoundCheck(SKIPS, "mine")()
    assert raised.value.optimizer == "mine"
    assert isinstance(raised.value, AssertionError)


def test_parametrize_makes_one_test_for_every_optimizer_and_check() -> None:
    """Ids read as optimizer and check; nothing is looked up before a test runs."""
    mark = parametrize_with_checks(["mine", "yours"], checks=[PASSES, FAILS], lr=0.5).mark
    assert [parameter.id for parameter in mark.args[1]] == [
        "mine-passes",
        "mine-fails",
        "yours-passes",
        "yours-fails",
    ]
    assert mark.args[0] == "check"
    assert len(parametrize_with_checks("mine").mark.args[1]) == len(CHECKS)


def test_check_ids_are_unique() -> None:
    """An id names one check."""
    assert len({check.id for check in CHECKS}) == len(CHECKS)


def test_temporary_plugins_nest_and_leave() -> None:
    """Inside both are there; afterwards the registry is the one of before."""
    before = get_registry()
    with temporary_plugin(Plugin("one"), name="a"), temporary_plugin(Plugin("two"), name="b") as registry:
        assert registry is get_registry()
        assert {"one", "two"} <= set(registry.optimizers())
        assert registry.owner("optimizer", "two").name == "b"
    assert get_registry() is before


def test_a_temporary_plugin_that_cannot_be_loaded_raises_and_leaves_nothing() -> None:
    """The message says why; the registry is the one of before."""
    before = get_registry()
    with pytest.raises(PluginError, match=r"plugin 'temporary' .* is broken: .*declares no megaopt_api"):
        temporary_plugin(object()).__enter__()
    with (
        temporary_plugin(Plugin("one"), name="a"),
        pytest.raises(DuplicateNameError, match="optimizer 'one'"),
    ):
        temporary_plugin(Plugin("one"), name="b").__enter__()
    assert get_registry() is before


def test_a_list_of_allowed_plugins_does_not_keep_a_temporary_one_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked for; the list is about what is installed."""
    monkeypatch.setenv("MEGAOPT_PLUGINS", "nothing")
    with temporary_plugin(Plugin("one"), name="a"), temporary_plugin(Plugin("two"), name="b") as registry:
        assert list(registry.optimizers()) == ["one", "two"]


def test_what_is_known_to_fail_is_shown_as_that() -> None:
    """With its reason; a check that holds all the same fails, and an unknown id is refused."""
    with temporary_plugin(Plugin("mine")):
        failed, passed = run_checks(
            "mine", checks=[FAILS, PASSES], lr=0.5, xfail={"fails": "it is slow", "passes": "it cannot"}
        )
        assert failed.status is CheckStatus.XFAILED
        assert failed.ok
        assert failed.message == "it is slow ('mine': too slow)"
        assert passed.status is CheckStatus.FAILED
        assert "was expected to fail (it cannot), but passes" in passed.message
        with pytest.raises(UnknownNameError, match="xfail='fials': there is no such check"):
            run_checks("mine", checks=[FAILS], xfail={"fials": "it is slow"})
    marks = (
        parametrize_with_checks("mine", checks=[FAILS], xfail={"fails": "it is slow"}).mark.args[1][0].marks
    )
    assert [(mark.name, mark.kwargs) for mark in marks] == [
        ("xfail", {"reason": "it is slow", "strict": True})
    ]


def test_fewer_checks_than_declared_fail() -> None:
    """So a check that begins to skip is noticed."""
    for at_least, message in ((1, None), (2, "1 of 2 checks can be made, but at least 2 are declared")):
        enough = parametrize_with_checks("mine", checks=[PASSES, SKIPS], at_least=at_least).mark.args[1][-1]
        assert enough.id == "mine-at_least"
        with temporary_plugin(Plugin("mine")):
            if message is None:
                enough.values[0]()
            else:
                with pytest.raises(ConformanceError, match=message):
                    enough.values[0]()


def test_a_check_that_the_plugin_skips_fails() -> None:
    """Only the kit says what cannot be checked."""

    def skips(optimizer: str, **settings: Any) -> None:
        raise unittest.SkipTest("not today")

    with temporary_plugin(Plugin("mine")):
        (result,) = run_checks("mine", checks=[Check("skipping", "it skips", skips)])
    assert result.status is CheckStatus.FAILED
    assert "skipped itself (not today)" in result.message
