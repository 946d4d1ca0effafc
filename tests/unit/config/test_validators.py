"""Each validator says which value it got and what is allowed."""

from typing import Any

import pytest
import torch
from attrs import field, make_class
from torch import nn

from megaopt_core import OptimizerConfig, OptimizerParamScheduler, get_registry
from megaopt_core.config import (
    between,
    boolean,
    core_field_info,
    not_negative,
    one_of,
    positive,
    whole_number,
)
from megaopt_core.config._validators import AT_LEAST_ZERO, FINITE, FRACTION, WHOLE_COUNT, Validator
from megaopt_core.errors import ConfigurationError, OverrideError, ScheduleError
from megaopt_core.params._overrides import validate_override


def _numeric_settings() -> list[str]:
    """Return the names of settings whose defaults are numbers, or that take one beside None."""
    owned = {name: info.field.default for name, info in get_registry().setting_owners().items()}
    core = {info.name: info.default for info in core_field_info()}
    optional = {
        "lr",
        "min_lr",
        "decoupled_lr",
        "decoupled_min_lr",
        "muon_scalar_lr",
        "muon_scalar_weight_decay",
    }
    return [
        name
        for name, default in (core | owned).items()
        if name in optional or (isinstance(default, int | float) and not isinstance(default, bool))
    ]


@pytest.mark.parametrize(
    ("validator", "good", "bad", "allowed"),
    [
        (between(0.0, 1.0), [0, 0.5], [1.0, -0.1, float("nan"), True, "0.5"], "a number in [0.0, 1.0)"),
        (positive(), [1e-9, 5], [0, -1, float("inf"), None], "a number above 0"),
        (not_negative(), [0, 5.0], [-1, float("inf"), False], "a number of at least 0"),
        (whole_number(1), [1, 9], [0, 1.0, True], "an integer of at least 1"),
        (boolean(), [True, False], [1, 0.0, "no", None], "True or False"),
        (one_of((True, False)), [True, False], [1, 0.0, "no"], "one of True, False"),
        (one_of(("a", "b")), ["a"], ["c", None], "one of 'a', 'b'"),
    ],
)
def test_validators(validator, good, bad, allowed):
    """Good values pass; bad ones raise an error that carries setting and value."""
    settings = make_class("Settings", {"x": field(validator=validator)})
    for value in good:
        assert settings(value).x == value
    for value in bad:
        with pytest.raises(ConfigurationError) as caught:
            settings(value)
        assert str(caught.value) == f"x={value!r}: must be {allowed}"
        assert caught.value.setting == "x"


BIG = 10**400
"""No float holds it, and `math.isfinite` raises."""


@pytest.mark.parametrize("value", [BIG, -BIG], ids=["above", "below"])
@pytest.mark.parametrize(
    "rule",
    [
        between(0.0, 1.0),
        positive(),
        not_negative(),
        whole_number(1),
        FINITE,
        FRACTION,
        AT_LEAST_ZERO,
        WHOLE_COUNT,
    ],
)
def test_whole_numbers_that_no_float_holds_are_refused(rule: Validator, value: int) -> None:
    """By the setting's name."""
    settings: Any = make_class("Settings", {"x": field(validator=rule)})
    with pytest.raises(ConfigurationError, match=r"^x=-?\d+: must be ") as caught:
        settings(value)
    assert caught.value.setting == "x"


@pytest.mark.parametrize(
    ("rule", "value", "allowed"),
    [
        (positive(), 1e39, "above 0 and finite in fp32"),
        (positive(), 1e-50, "above 0 and finite in fp32"),
        (not_negative(), 1e39, "finite in fp32"),
        (whole_number(), 1 << 63, "an integer of 64 bits"),
    ],
)
def test_numbers_that_cannot_be_computed_with_are_refused(
    rule: Validator, value: float, allowed: str
) -> None:
    """They are infinite, or 0, in the arithmetic of the parameters."""
    settings: Any = make_class("Settings", {"x": field(validator=rule)})
    with pytest.raises(ConfigurationError) as caught:
        settings(value)
    assert str(caught.value) == f"x={value!r}: must be {allowed}"


def test_numbers_at_the_limits_are_taken() -> None:
    """The smallest and the largest of fp32; a rate that a schedule has brought down below; a limit that never holds."""
    limits = ((positive(), 2.0**-149), (positive(), 3.4e38), (not_negative(), 1e-300), (AT_LEAST_ZERO, 1e300))
    for rule, value in limits:
        settings: Any = make_class("Settings", {"x": field(validator=rule)})
        assert settings(value).x == value


@pytest.mark.parametrize("name", sorted(_numeric_settings()))
def test_every_numeric_setting_names_itself(name: str) -> None:
    """Of the core and of every plugin that is installed."""
    for value in (BIG, -BIG):
        with pytest.raises(ConfigurationError, match=rf"{name}=-?10*: "):
            OptimizerConfig(**{name: value})


def test_overrides_and_schedules_refuse_them() -> None:
    """Which have checks of their own."""
    with pytest.raises(OverrideError, match="max_lr="):
        validate_override({"max_lr": BIG})
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with pytest.raises(ScheduleError, match="max_lr="):
        OptimizerParamScheduler(optimizer, 0.0, BIG, 0.0, 0, 1, "linear", 0.0, 0.0, 1, "constant")
