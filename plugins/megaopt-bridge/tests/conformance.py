"""What the tests of single sources share: the table of the page, and checks that are held to it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from megaopt_testing import CHECKS, BoundCheck
from megaopt_testing.suite import bound_checks

__all__ = ["TABLE", "make", "sometimes_long", "tabled"]

_RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "bridge.json"
TABLE: dict[str, dict[str, Any]] = json.loads(_RESULTS.read_text())["classes"]
"""Class to what came of it."""


def tabled(names: Iterable[str], **settings: Any) -> list[BoundCheck]:
    """Return the checks that the table has of some classes."""
    return [
        bound
        for name in names
        for bound in bound_checks(
            name, settings, [check for check in CHECKS if check.id in TABLE[name]["checks"]]
        )
    ]


def sometimes_long(checks: Iterable[BoundCheck], *often: str) -> list[Any]:
    """Return checks as parameters of a test: of some classes always, of all in the long runs.

    That settings act is tried with every value of every setting, which takes half of all the time: always of the first.
    """
    return [
        pytest.param(
            bound,
            id=str(bound),
            marks=[]
            if bound.name in often and (bound.name == often[0] or bound.check.id != "settings_act")
            else [pytest.mark.long],
        )
        for bound in checks
    ]


def make(check: BoundCheck) -> None:
    """Make a check, which has to fail where the table says so, by whatever the class raises."""
    if TABLE[check.name]["checks"][check.check.id] != "failed":
        check()
        return
    assert not check.run().ok
