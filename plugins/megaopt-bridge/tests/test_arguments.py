"""Arguments of a constructor become settings by their defaults and by their annotations."""

from typing import Any

import pytest
import torch
from asking import Mode

from megaopt_core import OptimizerConfig, build_optimizer, get_registry
from megaopt_core.errors import ConfigurationError

pytest.importorskip("megaopt_adam")
pytestmark = pytest.mark.any_python


NAME, PREFIX = "asking:Asks", "asking_asks"

GIVEN = {
    "betas": ((0.8, 0.9), [0.8, 0.9]),
    "sizes": ((1, 2, 3), [1, 2, 3]),
    "drop": ((1, "a"), [1, "a"]),
    "names": (("a", "b"), ["a", "b"]),
    "either": ((0.5, 0.25), [0.5, 0.25]),
    "mode": (Mode.EXACT, "exact"),
    "other": (Mode.FAST, "fast"),
}
"""Setting to what the class gets, and how a file may have it."""


@pytest.mark.parametrize("setting", GIVEN)
def test_what_is_given_reaches_the_class(setting) -> None:
    """As itself and as files have it: a list for a tuple, a text for a member."""
    expected, in_a_file = GIVEN[setting]
    for value in (expected, in_a_file):
        built = build_optimizer(torch.nn.Linear(3, 3, bias=False), NAME, lr=0.1, **{setting: value})
        (part,) = built.parts
        assert part.inner.given[setting] == expected
        assert type(part.inner.given[setting]) is type(expected)
    config = OptimizerConfig(optimizer=NAME, lr=0.1, **{f"{PREFIX}_{setting}": in_a_file})
    assert OptimizerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("betas", (0.9, 1.5), "a tuple of 2 of which each is a number in [0, 1), or None"),
        ("betas", (0.9,), "a tuple of 2 of which each is a number in [0, 1), or None"),
        ("sizes", (1.5,), "a tuple of which each is an integer, or None"),
        ("drop", 0.5, "a tuple, or None"),
        ("names", (1,), "a tuple of which each is a str, or None"),
        (
            "either",
            "a",
            "a number of at least 0, or a tuple of which each is a number of at least 0, or None",
        ),
        ("mode", "exactt", "one of 'fast', 'exact'"),
        ("other", "slow", "one of 'fast', 'exact', or None"),
    ],
)
def test_what_is_allowed_is_told(setting, value, allowed) -> None:
    """With the setting's full name and what was given."""
    get_registry().optimizer(NAME)
    with pytest.raises(ConfigurationError) as raised:
        OptimizerConfig(optimizer=NAME, lr=0.1, **{f"{PREFIX}_{setting}": value})
    assert str(raised.value) == f"{PREFIX}_{setting}={value!r}: must be {allowed}"


def test_a_default_is_always_allowed() -> None:
    """None too, though nothing else says that it may be given."""
    given: dict[str, Any] = {f"{PREFIX}_{name}": None for name in GIVEN if name != "mode"}
    assert OptimizerConfig(optimizer=NAME, lr=0.1, **given).to_dict()[f"{PREFIX}_betas"] is None
