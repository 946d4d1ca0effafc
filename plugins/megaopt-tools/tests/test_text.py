"""The text, its split, and the batches of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megaopt_tools.errors import TextError
from megaopt_tools.text import Text, batches, builtin_text, load_text, windows


def test_builtin_text_is_pythons_help_in_the_order_of_its_names() -> None:
    """Everybody with the same Python trains on the same bytes, and the digest says so."""
    text = builtin_text()
    assert text.data == "\n".join(topics[name] for name in sorted(topics)).encode()
    assert text.sha256 == hashlib.sha256(text.data).hexdigest()
    assert len(text.data) > 400_000


def test_first_nine_tenths_train_and_the_rest_is_held_out() -> None:
    """No byte is in both parts, and none in neither."""
    text = Text("numbers", bytes(range(95)))
    assert text.train.tolist() == list(range(85))
    assert text.val.tolist() == list(range(85, 95))
    assert text.train_bytes == 85


def test_a_file_is_read_as_bytes(tmp_path: Path) -> None:
    """A text needs no encoding."""
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\x00\n\r\n")
    assert load_text(path) == Text(str(path), b"\xff\x00\n\r\n")


def test_targets_follow_their_inputs() -> None:
    """A target is the byte after its input, and batches come from everywhere but beyond the end."""
    tokens = torch.arange(40)
    source = batches(tokens, batch_size=64, context=8, seed=0)
    inputs, targets = next(source)
    assert inputs.shape == targets.shape == (64, 8)
    assert torch.equal(targets, inputs + 1)
    assert (inputs.min(), targets.max()) == (0, 39)


def test_batches_depend_on_the_seed_alone() -> None:
    """The same seed gives the same batches, whatever else draws random numbers."""
    tokens = torch.arange(1000)
    first = batches(tokens, 4, 8, seed=7)
    second = batches(tokens, 4, 8, seed=7)
    other = batches(tokens, 4, 8, seed=8)
    one = [next(first)[0] for _ in range(3)]
    torch.rand(5)
    assert all(torch.equal(batch, next(second)[0]) for batch in one)
    assert not torch.equal(one[0], next(other)[0])


@given(length=st.integers(2, 60), context=st.integers(1, 20), batch_size=st.integers(1, 4))
def test_every_byte_but_the_first_is_a_target_once(length: int, context: int, batch_size: int) -> None:
    """Nothing of the held-out text is left out or counted twice."""
    tokens = torch.arange(length)
    targets = []
    for inputs, following in windows(tokens, batch_size, context):
        assert torch.equal(following, inputs + 1)
        assert inputs.shape[0] <= batch_size
        assert inputs.shape[1] <= context
        targets += following.flatten().tolist()
    assert targets == list(range(1, length))


def test_a_text_must_hold_a_window() -> None:
    """The message says how much is needed."""
    Text("t", bytes(40)).require_context(35)
    with pytest.raises(TextError) as error:
        Text("t", bytes(40)).require_context(36)
    assert str(error.value) == (
        "t: 40 bytes are too few for a context of 36: 90 % of the text must hold 37 bytes, and the rest 2; "
        "give a longer text or a smaller --context"
    )
    assert error.value.source == "t"


@pytest.mark.parametrize("length", [1, 3, 9])
def test_something_must_be_held_out(length: int) -> None:
    """A text too short to be split is refused, whatever the context."""
    with pytest.raises(TextError, match="are too few for a context of 1"):
        Text("t", bytes(length)).require_context(1)
