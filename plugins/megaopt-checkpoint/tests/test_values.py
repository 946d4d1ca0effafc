"""Plain values and tensors as JSON: whatever goes in comes out."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megaopt_checkpoint import decode, encode, load_checkpoint, save_checkpoint
from training import make

from megaopt_core.errors import CheckpointError

pytestmark = pytest.mark.any_python


def alike(left: Any, right: Any) -> bool:
    """Return whether two values are the same, with their types, NaN like NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return [*left] == [*right] and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    return left == right


A, B, C = (torch.arange(3.0) + start for start in (0, 10, 20))

COLLIDING = {
    "a number and its text": {1: A, "1": B},
    "a way and a key with a dot": {"a.b": A, "a": {"b": B}},
    "None and its text": {None: A, "None": B},
    "a position and its text": {"x": [A, B], "x.0": C},
    "an escaped dot": {"a%2Eb": A, "a.b": B, "a": {"b": C}},
    "tuples and their text": {(1, 2): A, "(1, 2)": B, "$0": C},
    "a key that looks like a position": {(1,): A, "$0": B, "$0$key": C},
    "empty keys": {"": A, ".": B, "..": C},
}


@pytest.mark.parametrize("extra", COLLIDING.values(), ids=COLLIDING)
def test_tensors_in_extra_keep_their_places(tmp_path, extra):
    """Keys that read alike when they are joined with dots do not share a tensor."""
    save_checkpoint(tmp_path / "last", None, None, extra=extra)
    assert alike(load_checkpoint(tmp_path / "last", None, None).extra, extra)


def test_group_settings_and_schedulers_use_the_same_names(tmp_path):
    """Tensors under keys that read alike, in a group and in a scheduler's state."""

    class Scheduler:
        state = COLLIDING["a number and its text"]

        def state_dict(self):
            return self.state

        def load_state_dict(self, state):
            self.state = state

    model, optimizer = make()
    setting = COLLIDING["a way and a key with a dot"]
    optimizer.param_groups[0]["mine"] = setting
    save_checkpoint(tmp_path / "last", model, optimizer, Scheduler())
    other_model, other = make()
    scheduler = Scheduler()
    scheduler.state = None
    load_checkpoint(tmp_path / "last", other_model, other, scheduler)
    assert alike(scheduler.state, Scheduler.state)
    assert alike(other.param_groups[0]["mine"], setting)


def test_tensors_as_keys(tmp_path):
    """Each is a key of its own."""
    tensors = {}
    encoded = encode({A: 1, B: {C: A}}, tensors, "extra")
    (first, one), (second, inner) = decode(encoded, tensors.__getitem__).items()
    assert (first is not second, one) == (True, 1)
    assert torch.equal(first, A)
    assert torch.equal(second, B)
    ((third, value),) = inner.items()
    assert torch.equal(third, C)
    assert torch.equal(value, A)


def test_a_name_is_given_once():
    """Whatever would overwrite a tensor is an error that names it."""
    with pytest.raises(CheckpointError, match=r"two tensors of a checkpoint would both be called 'extra\.x'"):
        encode({"x": A}, {"extra.x": B}, "extra")


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
TENSORS = st.lists(st.integers(0, 255), min_size=2, max_size=4).map(
    lambda v: torch.tensor(v, dtype=torch.uint8)
)
DTYPES = st.sampled_from([torch.float32, torch.bool, torch.bfloat16])
KEYS = st.recursive(
    PLAIN.filter(lambda value: value == value) | DTYPES,  # noqa: PLR0124 - a NaN is equal to nothing, not as a key either
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
VALUES = st.recursive(
    PLAIN | DTYPES | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "a.b", "b", "1", "0", "$0", "%2E"]), inner, max_size=4)
        | st.sets(KEYS, max_size=2)
    ),
    max_leaves=12,
)


@settings(max_examples=300)
@given(value=VALUES)
def test_whatever_goes_in_comes_out(value):
    """Through JSON, with every tensor under a name of its own."""
    tensors = {}
    encoded = json.loads(json.dumps(encode(value, tensors, "extra"), allow_nan=False))
    assert alike(decode(encoded, tensors.__getitem__), value)


def test_what_is_too_deep_or_too_long():
    """Depth has a limit that is said when it is saved; long integers come back."""
    deep = []
    for _ in range(150):
        deep = [deep]
    with pytest.raises(CheckpointError, match=r"extra\.0.* is nested more than 100 deep"):
        encode(deep, {}, "extra")
    number = -(10**6000)
    assert decode(json.loads(json.dumps(encode(number, {}, "extra"))), None) == number
