"""What the tests of single sources share."""

import json
from pathlib import Path

from megaopt_bridge.recipes import recipe_of
from megaopt_testing import CHECKS, BoundCheck

__all__ = ["RESULTS", "TABLED", "make"]

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "bridge.json"

_CLASSES = json.loads(RESULTS.read_text())["classes"].values()
_MADE = set.intersection(*(set(found["checks"]) for found in _CLASSES if "checks" in found))
TABLED = [check for check in CHECKS if check.id in _MADE]
"""The checks that the table was made with for every class; recipes say of these why they fail."""


def make(check: BoundCheck) -> None:
    """Make a check, which has to fail where the class's recipe says that it does, by whatever the class raises."""
    why = recipe_of(*check.name.split(":")).fails.get(check.check.id)
    if why is None:
        check()
        return
    assert not check.run().ok
