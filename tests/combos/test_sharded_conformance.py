"""Every installed optimizer holds the whole conformance kit under each strategy that shares work out.

In one process a strategy shares nothing out, but it lays parameters in memory of its own and steps ranges of it; the
checks that start ranks share them out among 2 and 4.
"""

import pytest
from megaopt_testing import BoundCheck
from megaopt_testing.suite import bound_checks

from megaopt_core import get_registry

STRATEGIES = ("distributed", "layer_wise")
"""`replicated` is the default, which the kit is run with elsewhere."""

CUT = ("fsdp",)
"""They step what FSDP2 has cut, which takes a process group: the checks that start ranks cut their model so."""

OVER_RANKS = ("world_sizes", "sharded", "resume_over_ranks")

EVERYTHING = ("adam", "muon")
"""One that is cut anywhere and one that steps whole tensors: plain `tox` makes all checks of them."""

SHORT = ("bit_exact_resume", "late_gradients", "precision", "state_before_first_step", "strides")
"""What it makes of the others; the long runs make the rest."""

ON_RANKS = (*EVERYTHING, "soap")
"""Two that are cut in their ways, and one whose state has other shapes: plain `tox` starts ranks for them."""


def _is_short(optimizer: str, check: str) -> bool:
    if check in OVER_RANKS:
        return optimizer in ON_RANKS
    return optimizer in EVERYTHING or check in SHORT


CASES = [
    pytest.param(
        check,
        id=f"{check}-{strategy}",
        marks=[] if _is_short(optimizer, check.check.id) else [pytest.mark.long],
    )
    for optimizer, entry in sorted(get_registry().optimizers().items())
    for strategy, accepted in sorted(get_registry().strategies().items())
    if strategy in (*STRATEGIES, *CUT) and entry.granularity in accepted.granularities
    for check in bound_checks(optimizer, {"sharding": strategy})
    if strategy in STRATEGIES or check.check.id in OVER_RANKS
]
"""Other pairs of optimizer and strategy fall back to one of these."""


@pytest.mark.parametrize("check", CASES)
def test_what_a_strategy_could_break(check: BoundCheck) -> None:
    """The check holds, or is about what the optimizer does not offer."""
    check()
