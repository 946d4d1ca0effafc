"""Every installed optimizer holds the whole conformance kit under each strategy that shares work out.

In one process a strategy shares nothing out, but it lays parameters in memory of its own and steps ranges of it; the
checks that start ranks share them out among 2 and 4.
"""

import pytest
from megaopt_testing import BoundCheck
from megaopt_testing.suite import bound_checks

from megaopt_core import get_registry

STRATEGIES = ("distributed", "layer_wise")
"""`replicated` is the default, which the kit is run with elsewhere; `fsdp` takes models of DTensors only."""

CASES = [
    check
    for optimizer, entry in sorted(get_registry().optimizers().items())
    for strategy, accepted in sorted(get_registry().strategies().items())
    if strategy in STRATEGIES and entry.granularity in accepted.granularities
    for check in bound_checks(optimizer, {"sharding": strategy})
]
"""Other pairs of optimizer and strategy fall back to one of these."""


@pytest.mark.parametrize("check", CASES, ids=lambda check: f"{check}-{check.settings['sharding']}")
def test_what_a_strategy_could_break(check: BoundCheck) -> None:
    """The check holds, or is about what the optimizer does not offer."""
    check()
