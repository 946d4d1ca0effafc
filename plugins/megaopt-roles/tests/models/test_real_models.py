"""Roles of real models, without the packages that they come from."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from model_fixtures.checking import describe, disagreements, expected_of, read_fixture
from model_fixtures.expected import EXPECTED
from model_fixtures.others import REPLICAS
from model_fixtures.real import REAL

from megaopt_core.params import MatrixView


@pytest.fixture(params=EXPECTED)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of a model."""
    return request.param


def build(name: str) -> nn.Module:
    """Return the stand-in for a model on the meta device."""
    with torch.device("meta"):
        return REPLICAS[name]()


def test_every_model_has_a_fixture_and_a_stand_in():
    """Expectations, stand-ins and fixtures speak of the same models."""
    fixtures = {path.stem for path in (Path(__file__).parent / "fixtures").glob("*.json")}
    assert set(EXPECTED) == set(REPLICAS) == fixtures
    assert set(REAL) <= set(EXPECTED)


def test_expectations_cover_the_model(name):
    """Every parameter of the real model matches exactly one rule, and every view fits it."""
    rows = read_fixture(name)
    expected = expected_of(name, rows)
    for parameter, shape, *_ in rows:
        if isinstance(expected[parameter], MatrixView):
            assert expected[parameter].matrix_shapes(shape)


def test_stand_in_is_the_model(name):
    """A stand-in has the names, shapes and ties of the real model."""
    strip = {row[0]: (row[1], sorted(row[3])) for row in read_fixture(name)}
    assert {row[0]: (row[1], sorted(row[3])) for row in describe(build(name))} == strip


def test_roles(name):
    """Every parameter of the stand-in is seen as expected, without a guess."""
    assert disagreements(name, build(name)) == []
