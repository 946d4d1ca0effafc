"""Coefficient sets come from the installed emerging-optimizers."""

import pytest
import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from megaopt_muon.coefficients import (
    get_supported_coefficient_types,
    resolve_coefficients,
    validate_coefficient_type,
)

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

pytestmark = pytest.mark.any_python

TYPES = [name for name in get_supported_coefficient_types() if name != "custom"]


@pytest.mark.parametrize("steps", [1, 3, 5, 9, 12])
@pytest.mark.parametrize("coefficient_type", TYPES)
def test_coefficients_are_those_that_the_package_iterates(coefficient_type, steps, monkeypatch):
    """For every type and number of steps, the sequence is the one that the package itself would use."""
    used = []
    monkeypatch.setattr(muon_utils, "newton_schulz_step", lambda x, a, b, c, **_: used.append((a, b, c)) or x)
    muon_utils.newton_schulz(__import__("torch").ones(2, 3), steps, coefficient_type)
    assert resolve_coefficients(coefficient_type, steps) == tuple(used)


def test_unknown_type_names_what_is_known():
    """The error lists the installed package's types."""
    with pytest.raises(ConfigurationError, match=r"'quintic2'.*'quintic'"):
        validate_coefficient_type("quintic2")


@pytest.mark.parametrize(
    "custom",
    [None, [], [(1.0, 2.0)], [(1.0, float("nan"), 0.0)], [(1.0, -1e39, 0.0)], [(float("inf"), 1.0, 1.0)]],
)
def test_custom_needs_triples(custom):
    """Type custom is refused without coefficients, or with malformed ones."""
    with pytest.raises(ConfigurationError, match=r"\(a, b, c\)"):
        resolve_coefficients("custom", 5, custom)


def test_coefficients_need_type_custom():
    """Coefficients that would not be read are refused."""
    with pytest.raises(ConfigurationError, match="only read with"):
        resolve_coefficients("quintic", 5, [(1.0, 2.0, 3.0)])


@pytest.mark.parametrize("steps", [0, -1, 2.5, True])
def test_number_of_steps_is_checked(steps):
    """At least one step, as an integer."""
    with pytest.raises(ConfigurationError, match="num_ns_steps"):
        resolve_coefficients("quintic", steps)


@pytest.mark.parametrize("custom", [[(1e300, 0, 0)], [(10**400, 0, 0)]])
def test_coefficients_that_float32_cannot_hold_are_refused(custom):
    """When the optimizer is built, not by torch in its first step."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    with pytest.raises(ConfigurationError, match=r"coefficients=.*\(a, b, c\)"):
        build_optimizer(model, "muon", lr=0.1, muon_coefficient_type="custom", muon_coefficients=custom)
