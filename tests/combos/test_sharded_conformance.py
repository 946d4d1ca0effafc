"""Every installed optimizer holds the checks that a sharding strategy could break, under each strategy.

In one process a strategy shares nothing out, but it lays parameters in memory of its own and steps ranges of it.
"""

import pytest
from megaopt_testing import CHECKS, CheckStatus, run_checks

from megaopt_core import get_registry

TOUCHED = (
    "bit_exact_resume",
    "non_finite_gradients",
    "tied_parameters",
    "frozen_parameters",
    "no_gradients",
    "this_gradient",
    "gradients_untouched",
    "written_in_place",
    "group_settings",
    "state_before_first_step",
    "state_dtypes",
    "precision",
    "report",
)
"""What depends on where values, gradients and state lie, and on which of them are stepped."""

PAIRS = [
    (optimizer, strategy)
    for optimizer, entry in sorted(get_registry().optimizers().items())
    for strategy, accepted in sorted(get_registry().strategies().items())
    if strategy in ("distributed", "layer_wise") and entry.granularity in accepted.granularities
]
"""`replicated` is the default, which the whole kit is run with; other pairs fall back to one of these."""


def test_the_checks_are_those_of_the_kit() -> None:
    """A check that was renamed would silently be left out."""
    assert set(TOUCHED) <= {check.id for check in CHECKS}


@pytest.mark.parametrize(("optimizer", "strategy"), PAIRS)
def test_what_a_strategy_could_break(optimizer: str, strategy: str) -> None:
    """All of them hold, and none is skipped."""
    checks = [check for check in CHECKS if check.id in TOUCHED]
    results = run_checks(optimizer, checks=checks, sharding=strategy)
    failed = {result.id: result.message or result.traceback for result in results if not result.ok}
    assert failed == {}
    assert [result.id for result in results if result.status is CheckStatus.SKIPPED] == []
