"""Reading and checking fixtures; shared by the tests and by regenerate.py."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from megaopt_core.params import MatrixView, Role, named_params
from megaopt_core.routing import infer_roles
from model_fixtures.expected import EXPECTED

__all__ = ["describe", "disagreements", "expected_of", "fixture_path", "read_fixture"]

type Row = list[object]
"""Qualified name, shape, type of the owning module, names that it is tied to."""


def fixture_path(name: str) -> Path:
    """Return where a model's parameters are written down."""
    return Path(__file__).parents[1] / "fixtures" / f"{name}.json"


def read_fixture(name: str) -> list[Row]:
    """Return a model's parameters as they were written down."""
    return json.loads(fixture_path(name).read_text())


def describe(model: nn.Module) -> list[Row]:
    """Return a model's parameters in the form of a fixture."""
    return [
        [entry.name, list(entry.param.shape), type(entry.owners[0][1]).__name__, list(entry.aliases)]
        for entry in named_params(model)
    ]


def expected_of(name: str, rows: list[Row]) -> dict[str, Role | MatrixView]:
    """Return what each parameter should be, after checking that the rules speak of each exactly once."""
    rules, used, found = EXPECTED[name], set(), {}
    for parameter, shape, *_ in rows:
        matching = [rule for rule in rules if fnmatchcase(str(parameter), rule)]
        if len(matching) > 1 or (not matching and len(shape) > 1):  # type: ignore[arg-type]
            raise AssertionError(f"{name}: {parameter} matches {matching}, it should match exactly one rule")
        used.update(matching)
        found[str(parameter)] = rules[matching[0]] if matching else Role.ELEMENTWISE
    unused = set(rules) - used
    if unused:
        raise AssertionError(f"{name}: rules that match nothing: {sorted(unused)}")
    return found


def disagreements(name: str, model: nn.Module) -> list[str]:
    """Return where the rules see a model otherwise than expected, or are not sure."""
    wrong = []
    decisions = infer_roles(model)
    for parameter, expected in expected_of(name, describe(model)).items():
        decision = decisions[parameter]
        found = decision.view if decision.role is Role.MATRIX else decision.role
        if found != expected:
            wrong.append(f"{parameter}: expected {expected}, found {found}: {decision.reason}")
        elif decision.uncertain:
            wrong.append(f"{parameter}: {found} as expected, but uncertain: {decision.reason}")
    return wrong
