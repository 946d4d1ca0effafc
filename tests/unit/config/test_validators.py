"""Each validator says which value it got and what is allowed."""

import pytest
from attrs import field, make_class

from megaopt_core.config import between, boolean, not_negative, one_of, positive, whole_number
from megaopt_core.errors import ConfigurationError


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
