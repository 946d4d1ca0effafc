"""What the tests of single sources share."""

from pathlib import Path

from megaopt_bridge.recipes import recipe_of
from megaopt_testing import BoundCheck

__all__ = ["RESULTS", "make"]

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "bridge.json"


def make(check: BoundCheck) -> None:
    """Make a check, which has to fail where the class's recipe says that it does, by whatever the class raises."""
    why = recipe_of(*check.name.split(":")).fails.get(check.check.id)
    if why is None:
        check()
        return
    assert not check.run().ok
