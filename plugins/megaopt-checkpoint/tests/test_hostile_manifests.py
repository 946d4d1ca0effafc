"""A manifest is data from a stranger: one named error before anything is written, and nothing outside is opened."""

import os
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import build, change, copied, opened_files, read, refused, save_good, sign, snapshot, unchanged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from megaopt_checkpoint.checksums import sum_of
from megaopt_checkpoint.coverage import tiles
from megaopt_checkpoint.values.chunks import chunks_of
from training import make

from megaopt_core.errors import CheckpointCorruptError, CheckpointError, MegaoptError
from megaopt_core.params import Shard, whole

pytestmark = pytest.mark.any_python


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with something in every field."""
    path = tmp_path_factory.mktemp("hostile") / "good"
    save_good(path)
    return path


@pytest.fixture
def bad(good: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return copied(good, tmp_path / "bad")


def first(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a model tensor's entry of 16 elements and its box."""
    entry = document["tensors"]["model.embedding.weight"]
    return entry, entry["chunks"][0]


@pytest.mark.parametrize(
    "name", ["../secret.bin", "/secret.bin", "secret", "rank-00001.bin/../../secret.bin"]
)
def test_a_file_outside_is_not_opened(bad, name):
    """Whatever the manifest says of it, with the right checksum and length."""
    secret = bad.parent / "secret.bin"
    document = read(bad)
    _, chunk = first(document)
    secret.write_bytes(b"s" * chunk["length"])
    if name.startswith("/"):
        name = str(secret)
    chunk.update(file=name, position=0, checksum=sum_of(memoryview(secret.read_bytes())))
    sign(bad, document)
    with opened_files() as opened:
        refused(bad, "is no valid manifest", CheckpointError)
    assert not [path for path in opened if "secret" in path]
    document["files"][name] = chunk["length"]
    sign(bad, document)
    with opened_files() as opened:
        refused(bad, r"not the name of a rank's file, such as rank-00000\.bin", CheckpointError)
    assert not [path for path in opened if "secret" in path]


def test_a_link_or_a_pipe_in_place_of_a_file(bad):
    """Neither is read, and a pipe lets nobody wait."""
    file = bad / "rank-00000.bin"
    file.rename(bad.parent / "moved")
    file.symlink_to(bad.parent / "moved")
    refused(bad, r"rank-00000\.bin is a symbolic link", CheckpointError)
    file.unlink()
    os.mkfifo(file)
    refused(bad, r"rank-00000\.bin is no regular file", CheckpointError)
    file.unlink()
    refused(bad, r"rank-00000\.bin is missing", CheckpointError)


def _hole(document: dict[str, Any]) -> None:
    entry, _ = first(document)
    entry["shape"][0] += 1


def _overlap(document: dict[str, Any]) -> None:
    entry, chunk = first(document)
    entry["chunks"] = [chunk, dict(chunk)]


def _hole_in_extra(document: dict[str, Any]) -> None:
    document["tensors"]["extra.rng"]["chunks"] = []


def _other_tensor(document: dict[str, Any]) -> None:
    state = document["optimizer"]["parameters"]["norm.weight"]["state"]
    state["exp_avg"] = {"tensor": "optim.state.norm.weight.exp_avg_sq"}


def _other_model_tensor(document: dict[str, Any]) -> None:
    document["model"]["tensors"]["norm.weight"] = "model.norm.bias"


def _step(value: Any) -> Callable[[dict[str, Any]], None]:
    def put(document):
        document["optimizer"]["parameters"]["norm.weight"]["state"]["step"] = {"value": value}

    return put


def _chunk(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: first(document)[1].update(fields)


def _tensor(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: first(document)[0].update(fields)


def _extra(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update(extra=value)


BAD = {
    "a hole": (_hole, "is not every element of the shape"),
    "an overlap": (_overlap, "is not every element of the shape"),
    "a hole in extra": (_hole_in_extra, "is not every element of the shape"),
    "another state's tensor": (_other_tensor, "not the stored tensor 'optim.state.norm.weight.exp_avg'"),
    "another parameter's tensor": (_other_model_tensor, "not the stored tensor 'model.norm.weight'"),
    "a negative offset": (_chunk(offsets=[-1, 0]), "not a list of 2 numbers"),
    "a negative position": (_chunk(position=-4), "not a whole number from 0"),
    "a NaN": (_chunk(position=float("nan")), "no JSON document: JSON has no NaN"),
    "an absurd size": (_tensor(shape=[2**62, 2**62]), "is not every element of the shape"),
    "a size as text": (_tensor(shape=["4", 4]), "not a list of at most 64 numbers"),
    "an unknown dtype": (_tensor(dtype="float3_x"), "dtype 'float3_x', which torch .* lacks"),
    "a dtype of another size": (_tensor(dtype="float64"), "not the bytes of"),
    "a quantized dtype": (_tensor(dtype="quint8"), "not a dtype of plain elements"),
    "a short length": (_chunk(length=1), "not the bytes of"),
    "a foreign file": (_chunk(file="rank-00007.bin"), "not one of the manifest's files"),
    "a list as a file": (_chunk(file=["rank-00000.bin"]), "not text"),
    "a tensor of others in extra": (_extra({"$tensor": "model.norm.weight"}), "which does not belong to it"),
    "a tensor twice in extra": (_extra([{"$tensor": "extra.rng"}] * 2), "which is used twice"),
    "a missing tensor": (_extra({"$tensor": "extra.gone"}), "which is not there"),
    "an unknown kind": (_extra({"$pickle": "x"}), r"unknown kind '\$pickle'"),
    "no number": (_extra({"$scalar": ["float32", [], "x"]}), "no number with a shape"),
    "an absurd scalar": (_extra({"$scalar": ["float32", [9], 1]}), "cannot be"),
    "unhashable": (_extra({"$set": [[1]]}), "cannot be"),
    "too deep": (_extra(eval("[" * 150 + "]" * 150)), "nested more than 100 deep"),  # noqa: S307 - a literal
    "no group": (lambda d: d["optimizer"]["parameters"]["norm.weight"].update(group=7), "not one of"),
    "params in a group": (
        lambda d: d["optimizer"]["groups"][0]["settings"].update(params=[1]),
        "it names 'params'",
    ),
    "a field more": (lambda d: d.update(more=1), "not an object of the fields"),
    "a field less": (lambda d: d.pop("extra"), "not an object of the fields"),
    "a list": (lambda d: d.update(tensors=[]), "not an object"),
    "a version of text": (lambda d: d.update(version="1"), "has format version '1'"),
    "an unknown algorithm": (
        lambda d: d.update(checksums="md5"),
        "checksums is 'md5', which is not 'xxh3-64'",
    ),
    "an algorithm that is no text": (
        lambda d: d.update(checksums=["xxh3-64"]),
        "checksums is .* not 'xxh3-64'",
    ),
    "a short sum": (_chunk(checksum="0" * 15), "not 16 digits from 0 to f"),
    "a sum as a number": (_chunk(checksum=1), "not 16 digits from 0 to f"),
    "a sum of other signs": (_chunk(checksum="\u0660" * 16), "not 16 digits from 0 to f"),
    "a sum with a sign": (_chunk(checksum="-" + "0" * 15), "not 16 digits from 0 to f"),
    "another sum": (_chunk(checksum="0" * 16), "is damaged: model.embedding.weight"),
    "a sum of another name": (_chunk(crc32=1), "not an object of the fields"),
    "no algorithm": (lambda d: d.pop("checksums"), "not an object of the fields"),
    "no ranks": (lambda d: d.update(world_size=0), "not a whole number from 1"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_fields_that_are_refused(bad, spoil, words):
    """By verification, loads and conversions alike, in the words of what is wrong."""
    document = read(bad)
    spoil(document)
    sign(bad, document)
    refused(bad, words, CheckpointError)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_step("3"), "state 'step' of 'norm.weight' .* is '3', which cannot become what it is here"),
        (_step({"$tuple": [1, 2]}), "state 'step' of 'norm.weight'"),
        (lambda d: d["optimizer"]["groups"][0]["settings"].update(lr="fast"), "the setting 'lr' of group 0"),
        (
            lambda d: d["optimizer"]["groups"][0]["settings"].update(betas={"$tuple": [0.9]}),
            "'betas' of group 0",
        ),
        (
            lambda d: d["optimizer"]["groups"][0]["settings"].update(lr=None),
            "the setting 'lr' of group 0 is None",
        ),
        (
            lambda d: d["optimizer"]["groups"][0]["settings"].update(lr={"$float": "inf"}),
            "the setting 'lr' of group 0 is inf",
        ),
        (lambda d: d["optimizer"]["groups"][0]["settings"].update(eps=None), "the setting 'eps' of group 0"),
        (
            lambda d: d["optimizer"]["groups"][0]["settings"].update(lr_mult={"$float": "nan"}),
            "the setting 'lr_mult' of group 0",
        ),
        (_step(None), "state 'step' of 'norm.weight'"),
        (lambda d: d["optimizer"].update(scaler={"scale": "x"}), "the loss scaler does not take its state"),
        (lambda d: d["scheduler"].update(num_steps="x"), "the scheduler does not take its state"),
        (_tensor(dtype="int16"), r"holds whole numbers \(int16\) there and real numbers"),
    ],
    ids=[
        *("step", "steps", "lr", "betas", "no-lr", "infinite-lr", "no-eps", "nan-mult", "no-step"),
        *("scaler", "scheduler", "dtype"),
    ],
)
def test_values_that_do_not_fit(bad, spoil, words):
    """What only the live objects can tell is found before anything is written."""
    document = read(bad)
    spoil(document)
    sign(bad, document)
    live = build(seed=1)
    before = snapshot(*live)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(bad, *live)
    assert unchanged(before, snapshot(*live))


def test_a_checkpoint_of_ranks_that_did_not_hold_everything(bad):
    """Of what the others held it has no state and no shape: verification and loads see it."""
    document = read(bad)
    document["optimizer"]["parameters"]["norm.weight"].update(shape=[], state={})
    sign(bad, document)
    refused(bad, "norm.weight.shape is .*which is not the shape .* that the model has", CheckpointError)


@pytest.mark.parametrize("value", [None, "3", [1, 2], {"a": 1}], ids=["none", "text", "list", "object"])
@pytest.mark.parametrize("key", ["last_epoch", "T_max", "eta_min", "_step_count"])
def test_numbers_of_a_scheduler_of_torch(tmp_path, key, value):
    """Torch's take any value and fail when they are stepped; a load refuses it, and changes nothing."""
    model, optimizer = make(width=4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    save_checkpoint(tmp_path / "last", model, optimizer, scheduler)
    document = read(tmp_path / "last")
    document["scheduler"][key] = value
    sign(tmp_path / "last", document)
    before = scheduler.state_dict()
    with pytest.raises(
        CheckpointError, match=f"a state of CosineAnnealingLR in which {key} is .*number here"
    ):
        load_checkpoint(tmp_path / "last", model, optimizer, scheduler)
    assert scheduler.state_dict() == before


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"nul", b"\xff", b"[" * 10**6, b'{"a":' + b"9" * 5000 + b"}"]
)
def test_documents_that_are_none(bad, data):
    """Named, whatever the parser says."""
    sign(bad, data)
    refused(bad, "no JSON document|not a megaopt checkpoint's", CheckpointError)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_random_changes(good, tmp_path, seed):
    """A named error and nothing changed, or a load; never anything else."""
    # The script in tests/faults has more.
    chance = random.Random(seed)  # noqa: S311 - hypothesis chooses
    document = read(good)
    for _ in range(chance.choice([1, 2])):
        change(document, chance)
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    sign(tmp_path, document)
    live = build(seed=1)
    before = snapshot(*live)
    try:
        load_checkpoint(tmp_path, *live)
    except MegaoptError as error:
        assert unchanged(before, snapshot(*live))
        if isinstance(error, CheckpointCorruptError):
            with pytest.raises(MegaoptError):
                verify_checkpoint(tmp_path)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@settings(max_examples=200)
@given(shape=SHAPES, cuts=st.lists(st.integers(0, 300), max_size=4), chance=st.randoms(use_true_random=False))
def test_coverage_against_counting(shape, cuts, chance):
    """Boxes of ranges tile; with one moved, dropped or doubled they do where counting each element says so."""
    numel = torch.Size(shape).numel()
    ends = [0, *sorted(cut % (numel + 1) for cut in cuts), numel]
    boxes = [
        (chunk.offsets, chunk.sizes)
        for start, stop in pairwise(ends)
        if start < stop or not numel
        for chunk in chunks_of(Shard("w", shape, whole(shape), start, stop))
    ]
    assert tiles(shape, boxes)
    if not numel or not boxes:
        return
    index = chance.randrange(len(boxes))
    kind = chance.choice(["move", "drop", "double", "swap"])
    if kind == "drop":
        del boxes[index]
    elif kind == "double":
        boxes.append(boxes[index])
    elif kind == "move":
        sizes = boxes[index][1]
        offsets = tuple(chance.randint(0, extent - size) for extent, size in zip(shape, sizes, strict=True))
        boxes[index] = offsets, sizes
    count = torch.zeros(shape)
    for offsets, sizes in boxes:
        count[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))] += 1
    assert tiles(shape, boxes) == bool((count == 1).all())
