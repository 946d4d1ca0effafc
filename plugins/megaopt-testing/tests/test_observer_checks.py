"""Checks of step observers: megaopt-guards passes, and each check catches an observer that it is for."""

import bad_observers
import pytest
from bad_observers import BAD, Offers
from megaopt_testing import CheckStatus, run_checks, run_command, temporary_plugin
from megaopt_testing.observer_checks import OBSERVER_CHECKS
from megaopt_testing.plugin import megaopt_commands
from megaopt_testing.processes import processes_missing

from megaopt_core.errors import PluginError

pytestmark = [
    pytest.mark.any_python,
    pytest.mark.skipif(processes_missing() is not None, reason="no processes"),
]


def test_guards_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """`check-plugin` finds that the plugin watches steps, and makes every check of them."""
    assert run_command(megaopt_commands, ["check-plugin", "guards"]) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert [f"passed  {check.id}" in printed for check in OBSERVER_CHECKS] == [True] * len(OBSERVER_CHECKS), (
        printed
    )


@pytest.mark.parametrize("name", BAD)
def test_a_bad_observer_fails_the_check_that_it_is_for(name: str) -> None:
    """The message names plugin and method."""
    intended, told = BAD[name]
    checks = [check for check in OBSERVER_CHECKS if check.id == f"observers_{intended}"]
    with temporary_plugin(Offers(getattr(bad_observers, name)), name="bad"):
        (result,) = run_checks("bad", kind="observers", checks=checks)
    assert (result.status, result.traceback) == (CheckStatus.FAILED, ""), result
    assert told in result.message, result.message
    assert "bad" in result.message
    assert result.hint


def test_every_check_has_an_observer_that_it_catches() -> None:
    """A check that nothing can fail proves nothing."""
    assert {f"observers_{intended}" for intended, _ in BAD.values()} == {
        check.id for check in OBSERVER_CHECKS
    }


def test_a_plugin_that_watches_nothing_has_no_observers_to_check() -> None:
    """The error names the hook."""
    with pytest.raises(
        PluginError, match="no plugin 'testing' watches steps: none implements megaopt_step_observers"
    ):
        run_checks("testing", kind="observers")
