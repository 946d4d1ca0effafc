"""Overrides combine in any order, and say who conflicts."""

import copy
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megaopt_core import ParamGroupOverride, combine_param_group_overrides, param_group_override_to_tuple
from megaopt_core.errors import OverrideConflictError, OverrideError
from megaopt_core.params._overrides import validate_override

VALUES = st.one_of(st.integers(-3, 3), st.text(max_size=3), st.none(), st.tuples(st.integers(0, 3)))
COMMON = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
OVERRIDES = st.lists(
    st.none() | st.dictionaries(st.sampled_from(["a", "b", "max_lr", "wd_mult"]), VALUES), max_size=4
)


def _combined(overrides: Sequence[ParamGroupOverride | None]) -> str | ParamGroupOverride | None:
    try:
        return combine_param_group_overrides(overrides)
    except OverrideConflictError as error:
        return error.key


@COMMON
@given(OVERRIDES, st.randoms(use_true_random=False))
def test_combination_does_not_depend_on_the_order(overrides, random):
    """Any order gives the same result, or a conflict in every order; the inputs stay as they are."""
    shuffled = copy.deepcopy(overrides)
    random.shuffle(shuffled)
    kept = copy.deepcopy(shuffled)
    one, other = _combined(overrides), _combined(shuffled)
    assert isinstance(one, str) == isinstance(other, str)
    if not isinstance(one, str):
        assert one == other
    assert shuffled == kept


@COMMON
@given(st.dictionaries(st.sampled_from("abcdef"), VALUES))
def test_tuples_are_sorted_by_key(override):
    """Equal overrides give equal tuples, whatever their insertion order."""
    backwards = dict(reversed(list(override.items())))
    assert param_group_override_to_tuple(override) == param_group_override_to_tuple(backwards)
    assert [key for key, _ in param_group_override_to_tuple(override)] == sorted(override)


def test_none_stays_none():
    """No override is not an empty one."""
    assert param_group_override_to_tuple(None) is None
    assert param_group_override_to_tuple({}) == ()


def test_a_conflict_names_key_values_sources_and_parameter():
    """The error is a ValueError that says everything there is to say."""
    with pytest.raises(ValueError, match="conflicting") as caught:
        combine_param_group_overrides(
            [{"wd_mult": 0.0}, {"wd_mult": 1.0}],
            sources=["standard: A", "config_overrides: B"],
            param_name="w",
        )
    assert str(caught.value) == (
        "conflicting overrides for parameter 'w': 'wd_mult' is 0.0 from standard: A and 1.0 from config_overrides: B"
    )
    assert caught.value.values == (0.0, 1.0)


def test_lr_means_max_lr():
    """`lr` is an alias; both together must agree."""
    assert validate_override({"lr": 0.1}) == {"max_lr": 0.1}
    assert validate_override({"lr": 0.1, "max_lr": 0.1}) == {"max_lr": 0.1}
    with pytest.raises(
        OverrideConflictError, match=r"'lr' and 'max_lr', which mean the same, to 0\.1 and 0\.2"
    ):
        validate_override(ParamGroupOverride(max_lr=0.1) | {"lr": 0.2})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            {"params": []},
            "an override cannot set 'params' (to []): its key says which parameters it means",
        ),
        ({"max_lr": -1.0}, "override max_lr=-1.0: must be finite and not negative"),
        ({"wd_mult": float("nan")}, "override wd_mult=nan: must be finite and not negative"),
        ({"max_lr": True}, "override max_lr=True: must be a number"),
        ({"x": {}}, "override x={}: a value is a str, bool, int, float, None or a tuple of them, got dict"),
        ({3: 1.0}, "an override's keys are strings, got 3"),
        ([1], "an override is a ParamGroupOverride (a dict), got list: [1]"),
    ],
)
def test_bad_overrides_are_refused(override, message):
    """Each error names what was given and what is allowed."""
    with pytest.raises(OverrideError) as caught:
        validate_override(override)
    assert str(caught.value) == message
