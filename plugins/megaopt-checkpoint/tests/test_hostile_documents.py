"""Documents that readers may read differently, and files that are other than they seem: refused."""

import json
import os
import random
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hostile import build, copied, read, refused, save_good, sign, snapshot, unchanged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaopt_checkpoint import load_checkpoint, verify_checkpoint
from megaopt_checkpoint.plugin import megaopt_commands
from megaopt_testing import run_command

from megaopt_core.errors import CheckpointCorruptError, CheckpointError, MegaoptError

main = partial(run_command, megaopt_commands)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with something in every field."""
    path = tmp_path_factory.mktemp("documents") / "good"
    save_good(path)
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return copied(good, tmp_path / "bad")


TEXTS = {
    "a key twice": (lambda text: f'{text[:-1]},"extra":7}}', "the key 'extra' comes twice"),
    "a key twice, written differently": (
        lambda text: f'{text[:-1]},"\\u0065xtra":7}}',
        "'extra' comes twice",
    ),
    "a key twice inside": (
        lambda text: text.replace('"world_size"', '"written":{"a":"","a":""},"world_size"'),
        "the key 'a' comes twice",
    ),
    "too large a number": (lambda text: f'{text[:-1]},"x":1e400}}', "1e400 is larger than any number"),
    "too small a number": (lambda text: f'{text[:-1]},"x":[-1E+999]}}', "larger than any number"),
    "infinity": (lambda text: f'{text[:-1]},"x":-Infinity}}', "JSON has no -Infinity"),
    "no number": (lambda text: f'{text[:-1]},"x":NaN}}', "JSON has no NaN"),
    "half a character as a key": (lambda text: f'{text[:-1]},"\\ud800":1}}', "surrogates not allowed"),
    "half a character": (lambda text: f'{text[:-1]},"x":["\\uDFFF"]}}', "surrogates not allowed"),
    "a byte order mark": (lambda text: f"\ufeff{text}", "BOM"),
    "something after it": (lambda text: f"{text}{{}}", "Extra data"),
    "a number of too many digits": (lambda text: f'{text[:-1]},"x":{"9" * 5000}}}', "digits"),
}


@pytest.mark.parametrize(("change", "words"), TEXTS.values(), ids=TEXTS)
def test_documents_that_readers_may_differ_over(bad, change, words):
    """Strict JSON in UTF-8, each key once."""
    sign(bad, change(json.dumps(read(bad))).encode())
    refused(bad, words, CheckpointCorruptError)


def test_another_encoding_is_refused(bad):
    """UTF-16 is what Python's reader would guess."""
    sign(bad, json.dumps(read(bad)).encode("utf-16"))
    refused(bad, "is no JSON document", CheckpointCorruptError)


def test_a_manifest_that_is_longer_than_any_is_not_read(bad):
    """A file without blocks has any size."""
    os.truncate(bad / "manifest.json", 2**40)
    refused(bad, "more than the 2147483648 that it may have", CheckpointCorruptError)


def test_a_checksum_file_that_is_too_long_is_not_read(bad):
    """It has one line."""
    os.truncate(bad / "manifest.sha256", 2**40)
    refused(bad, "more than the 80 that it may have", CheckpointCorruptError)


@pytest.mark.parametrize(
    "name",
    [
        "rank-\u0660\u0660\u0660\u0660\u0660.bin",
        "RANK-00000.BIN",
        "rank-00000.bin\n",
        "rank-00000.bin\x00",
        ".",
    ],
)
def test_names_that_only_look_like_those_of_files(bad, name):
    """Digits of other scripts, other cases, line ends, zeros."""
    document = read(bad)
    document["files"][name] = 0
    sign(bad, document)
    refused(bad, "not the name of a rank's file", CheckpointCorruptError)


@pytest.mark.parametrize("name", ["rank-00000.bin", "manifest.json", "manifest.sha256"])
def test_what_is_no_regular_file_is_not_read(bad, name):
    """A folder, a device that never ends, a socket, a pipe, a link."""
    file, moved = bad / name, bad.parent / "moved"
    file.rename(moved)
    file.mkdir()
    refused(bad, "is no regular file", CheckpointCorruptError)
    file.rmdir()
    os.mkfifo(file)
    refused(bad, "is no regular file", CheckpointCorruptError)
    file.unlink()
    file.symlink_to(moved)
    refused(bad, "is a symbolic link", CheckpointCorruptError)
    file.unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        here = os.getcwd()  # noqa: PTH109 - a socket's path is short
        os.chdir(bad)
        try:
            listening.bind(name)
        finally:
            os.chdir(here)
        refused(bad, "cannot be read", CheckpointError)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (10**400, "cannot become what it is here|counts no steps"),
        (-1, "counts no steps"),
        ({"$float": "nan"}, "counts no steps"),
        ({"$float": "inf"}, "counts no steps"),
        ({"$scalar": ["float32", [], {"$float": "nan"}]}, "counts no steps"),
        ({"$scalar": ["float32", [], -3.0]}, "counts no steps"),
    ],
)
def test_a_step_count_counts_steps(bad, value, words):
    """What is none is found before anything is written."""
    document = read(bad)
    document["optimizer"]["parameters"]["norm.weight"]["state"]["step"] = {"value": value}
    sign(bad, document)
    live = build(seed=1)
    before = snapshot(*live)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(bad, *live)
    assert unchanged(before, snapshot(*live))


def test_a_terminal_is_not_steered_by_a_manifest(bad, capsys):
    """Signs that are no text are written out by the command."""
    document = read(bad)
    document["written"]["\x1b[31mred"] = "\x07\r\x9b1m"
    sign(bad, document)
    assert main(["verify-checkpoint", str(bad), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert all(sign.isprintable() or sign == "\n" for sign in printed)
    assert "\\x1b[31mred \\x07\\r\\x9b1m" in printed


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=8),
    st.sampled_from(["\x00", "../x", "/dev/zero", "a" * 70_000, "\ud800", "rank-00000.bin"]),
)
KEYS = st.one_of(
    st.text(max_size=4),
    st.sampled_from(
        ["$tensor", "$scalar", "$dict", "$set", "$float", "$bytes", "$dtype", "$tuple", "value", "ranges"]
    ),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


def as_text(value: Any, chance: random.Random) -> str:
    """Return JSON of a value as no writer of ours has it: keys twice, escapes, literals that JSON lacks, deep lists."""
    if isinstance(value, dict):
        pairs = [(key, as_text(item, chance)) for key, item in value.items()]
        if pairs and chance.random() < 0.002:
            pairs.append(chance.choice(pairs))
        return "{" + ",".join(f"{json.dumps(key)}:{item}" for key, item in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(as_text(item, chance) for item in value) + "]"
    if chance.random() < 0.001:
        depth = chance.choice([1, 90, 5000])
        return "[" * depth + json.dumps(value) + "]" * depth
    return json.dumps(value)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(value=ANYTHING, seed=st.integers(0, 2**32), is_key=st.booleans())
def test_anything_anywhere(good, tmp_path, value, seed, is_key):
    """A value of any kind in any place: a named error and nothing changed, or a load of what verification takes."""
    chance = random.Random(seed)  # noqa: S311 - hypothesis chooses
    document = read(good)
    held, key = document, None
    while isinstance(held, (dict, list)) and held and (key is None or chance.random() < 0.8):
        parent, key = held, chance.choice(list(held) if isinstance(held, dict) else range(len(held)))
        held = parent[key]
    if is_key and isinstance(parent, dict):
        parent[str(value)] = parent.pop(key)
    else:
        parent[key] = value
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sign(tmp_path, as_text(document, chance).encode("utf-8", "surrogatepass"))
    live = build(seed=1)
    before = snapshot(*live)
    try:
        verify_checkpoint(tmp_path)
    except MegaoptError:
        with pytest.raises(MegaoptError):
            load_checkpoint(tmp_path, *live)
        assert unchanged(before, snapshot(*live))
        return
    try:
        load_checkpoint(tmp_path, *live)
    except CheckpointCorruptError:
        raise  # verification would have found it
    except MegaoptError:
        assert unchanged(before, snapshot(*live))
