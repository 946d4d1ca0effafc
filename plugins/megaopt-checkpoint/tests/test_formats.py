"""Checkpoints of older formats: written by what wrote them then, read, verified and converted by what is here."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hostile import read, sign
from megaopt_checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from megaopt_checkpoint.plugin import megaopt_commands
from megaopt_testing import run_command
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointCorruptError
from megaopt_core.optimizers import MegatronOptimizer

main = partial(run_command, megaopt_commands)

pytestmark = pytest.mark.any_python

FORMATS = Path(__file__).parent / "formats"


@pytest.fixture
def third(tmp_path: Path) -> Path:
    """A copy of a checkpoint of format 3, whose sums are CRC-32."""
    return Path(shutil.copytree(FORMATS / "version-3", tmp_path / "third"))


def live() -> tuple[nn.Sequential, MegatronOptimizer]:
    """Return the model of that checkpoint with other values, and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    return model, build_optimizer(model, "adam", lr=1e-3)


def test_format_3_loads(third):
    """Values, states and extra parts as they were saved."""
    model, optimizer = live()
    report = load_checkpoint(third, model, optimizer)
    stored = torch.frombuffer(bytearray((third / "rank-00000.bin").read_bytes()[:24]), dtype=torch.float32)
    assert torch.equal(model[0].weight, stored.view(2, 3))
    assert float(optimizer.state[model[0].weight]["step"]) == 2.0
    assert report.extra["step"] == 2
    assert report.extra["noise"].tolist() == [0, 1, 2, 3, 4]


def test_format_3_is_verified_by_its_crc_32(third, capsys):
    """One bit is found by verification and by a load; the command says which sums they are."""
    assert verify_checkpoint(third).checksums == "crc32"
    assert main(["verify-checkpoint", str(third), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checksums"] == "crc32"
    data = bytearray((third / "rank-00000.bin").read_bytes())
    data[50] ^= 1
    (third / "rank-00000.bin").write_bytes(data)
    with pytest.raises(CheckpointCorruptError, match=r"is damaged: extra\.noise"):
        verify_checkpoint(third)
    with pytest.raises(CheckpointCorruptError, match=r"is damaged: extra\.noise"):
        load_checkpoint(third, *live())


def test_format_3_becomes_one_file_and_today_s_format(third, tmp_path):
    """Sums are computed anew; a file of that format, with sums of CRC-32, is read too."""
    convert_checkpoint(third, tmp_path / "one.pt")
    held = torch.load(tmp_path / "one.pt", weights_only=True)
    assert json.loads(held["megaopt"])["checksums"] == "xxh3-64"
    convert_checkpoint(tmp_path / "one.pt", tmp_path / "fourth")
    assert verify_checkpoint(tmp_path / "fourth").checksums == "xxh3-64"
    assert read(tmp_path / "fourth")["version"] == 4
    document = read(third)
    del document["format"]
    for tensor in document["tensors"].values():
        tensor["chunks"][0].update(file="", position=0)
    torch.save({**held, "megaopt": json.dumps({**document, "files": {}})}, tmp_path / "old.pt")
    convert_checkpoint(tmp_path / "old.pt", tmp_path / "again")
    one, other = verify_checkpoint(tmp_path / "fourth"), verify_checkpoint(tmp_path / "again")
    assert one.tensors == other.tensors


@pytest.mark.parametrize(
    ("crc32", "words"),
    [(-1, "from 0 to 2"), (2**32, r"to 2\*\*32 - 1"), ("0" * 8, "a whole number"), (True, "a whole number")],
)
def test_sums_of_format_3_are_checked(third, crc32, words):
    """They are numbers of 32 bits there."""
    document = read(third)
    document["tensors"]["extra.noise"]["chunks"][0]["crc32"] = crc32
    sign(third, document)
    with pytest.raises(CheckpointCorruptError, match=words):
        verify_checkpoint(third)


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
