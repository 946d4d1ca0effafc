"""What is no checkpoint's file, no scheduler, no group, no name: each is said in words, and nothing is written."""

import pickle
from typing import Any

import pytest
import torch
from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointError, ConfigurationError

CONTENTS = {
    "garbage": b"x" * 100,
    "empty": b"",
    "half a zip": b"PK\x03\x04" + b"\0" * 100,
    "a pickle": pickle.dumps({"a": 1}),
    "a hostile pickle": b"cos\nsystem\n(S'false'\ntR.",
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ""])
@pytest.mark.parametrize("contents", CONTENTS)
def test_what_cannot_be_converted(tmp_path, contents, suffix):
    """Whatever the reader of such files raises, the error is ours and names the file."""
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    source = tmp_path / f"source{suffix}"
    source.write_bytes(CONTENTS[contents])
    with pytest.raises(CheckpointError, match=r"source(\.\w+)? (cannot be read|is not a consolidated)"):
        convert_checkpoint(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@pytest.fixture
def live() -> Any:
    """A model and its optimizer."""
    model = nn.Linear(2, 2)
    return model, build_optimizer(model, "adam", lr=0.1)


@pytest.mark.parametrize("path", [None, 3, b"last", "", "a\0b", "x" * 300])
def test_what_is_no_path(live, path):
    """Saving, loading, verifying and converting say so alike."""
    for action in (
        lambda: save_checkpoint(path, *live),
        lambda: load_checkpoint(path, *live),
        lambda: verify_checkpoint(path),
        lambda: convert_checkpoint(path, "out.pt"),
    ):
        with pytest.raises(CheckpointError, match=r"^path: "):
            action()


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("scheduler", 3, "scheduler: got int; give an object with"),
        (
            "scheduler",
            torch.optim.lr_scheduler.StepLR,
            "scheduler: got the class StepLR; give an object with",
        ),
        ("process_group", "world", "process_group: got str; give a torch.distributed.ProcessGroup"),
        ("fqn", "layers", "fqn: got str; give a function that takes a chunk index and a local name"),
    ],
)
def test_what_comes_beside_them(live, tmp_path, name, value, shown):
    """Before anything is written or read."""
    for action in (save_checkpoint, load_checkpoint):
        with pytest.raises(ConfigurationError, match=shown):
            action(tmp_path / "last", *live, **{name: value})
    assert list(tmp_path.iterdir()) == []


def test_names_that_are_none(live, tmp_path):
    """A function that returns no name, and renamings that are none."""
    with pytest.raises(
        ConfigurationError, match="fqn: got int; for chunk 0 and 'weight' it must return a name"
    ):
        save_checkpoint(tmp_path / "last", *live, fqn=lambda chunk, local: 3)
    for rename in (3, {"weight": 3}):
        with pytest.raises(
            ConfigurationError, match=r"rename: got int; give \{name in the checkpoint: name here\}"
        ):
            load_checkpoint(tmp_path / "last", *live, rename=rename)
