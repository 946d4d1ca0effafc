"""Checkpoints of another format are refused, and files hold the bytes that their sums are of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile import read, sign
from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointCorruptError, CheckpointVersionError

pytestmark = pytest.mark.any_python


@pytest.mark.parametrize("version", [1, 2, 3, 5, 0, -1, True, 4.0, "4", None])
def test_another_format_is_refused(tmp_path, version):
    """By loads, verification and conversions, before anything has changed; the error names both formats."""
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    save_checkpoint(tmp_path / "last", model, optimizer)
    document = read(tmp_path / "last")
    document["version"] = version
    sign(tmp_path / "last", document)
    before = str((model.state_dict(), optimizer.state_dict()))
    words = rf"format version {version!r}, written by megaopt-core \d.*reads format 4 alone.*pip install --upgrade"
    for act in (
        lambda: load_checkpoint(tmp_path / "last", model, optimizer),
        lambda: verify_checkpoint(tmp_path / "last"),
        lambda: convert_checkpoint(tmp_path / "last", tmp_path / "one.pt"),
    ):
        with pytest.raises(CheckpointVersionError, match=words):
            act()
    assert str((model.state_dict(), optimizer.state_dict())) == before


@pytest.mark.parametrize("version", [3, 5])
def test_a_file_of_another_format_is_refused(tmp_path, version):
    """A consolidated file holds the same document."""
    model = torch.nn.Linear(3, 2)
    save_checkpoint(tmp_path / "last", model, build_optimizer(model, "sgd", lr=0.1))
    convert_checkpoint(tmp_path / "last", tmp_path / "one.pt")
    held = torch.load(tmp_path / "one.pt", weights_only=True)
    document = {**json.loads(held["megaopt"]), "version": version}
    torch.save({**held, "megaopt": json.dumps(document)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointVersionError, match=f"format version {version}"):
        convert_checkpoint(tmp_path / "other.pt", tmp_path / "again")
    assert not (tmp_path / "again").exists()


ENDS = """
import sys, torch
from megaopt_checkpoint import save_checkpoint, writer
from megaopt_core import build_optimizer
sys.path.insert(0, sys.argv[2])
from training import stand_in
with stand_in():
    model = torch.nn.Linear(2048, 600)
    optimizer = build_optimizer(model, "sgd", lr=0.1)
    write = writer._sum_meanwhile
    import concurrent.futures.thread as pools, time
    def later(memory, beside):
        while not pools._shutdown:
            time.sleep(0.01)
        return write(memory, beside)
    writer._sum_meanwhile = later
    save_checkpoint(sys.argv[1], model, optimizer, async_save=True)
"""


def test_a_save_in_the_background_outlives_the_script(tmp_path):
    """The interpreter waits for it, and begins no more threads then; sums are computed all the same."""
    arguments = [sys.executable, "-c", ENDS, str(tmp_path / "last"), str(Path(__file__).parent)]
    subprocess.run(arguments, check=True, timeout=120)
    assert verify_checkpoint(tmp_path / "last").tensors["model.weight"].shape == (600, 2048)


def test_what_is_written_is_what_the_sum_is_of(tmp_path):
    """Boxes longer than a leaf, written and verified."""
    model = torch.nn.Linear(3000, 1000)
    save_checkpoint(tmp_path / "last", model, build_optimizer(model, "sgd", lr=0.1))
    chunks = verify_checkpoint(tmp_path / "last").tensors["model.weight"].chunks
    assert [chunk.length for chunk in chunks] == [12_000_000]
    with (tmp_path / "last" / "rank-00000.bin").open("r+b") as file:
        file.seek(chunks[0].position + 10_000_000)
        file.write(b"\x01\x02\x03")
    with pytest.raises(CheckpointCorruptError, match=r"is damaged: model\.weight"):
        verify_checkpoint(tmp_path / "last")
