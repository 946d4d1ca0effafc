"""What a checkpoint survives: kills, damaged files, full disks."""

import json
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Never

import pytest
from torch import nn

from megaopt_core.optimizers import MegatronOptimizer

sys.path.insert(0, str(Path(__file__).parents[2] / "plugins/megaopt-checkpoint/tests"))

from megaopt_checkpoint import load_checkpoint, save_checkpoint, verify_checkpoint
from megaopt_checkpoint.manifest import read_manifest
from training import logical_state, make, same, train, values

from megaopt_core.errors import CheckpointError

pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).with_name("kill_during_save.py")


@pytest.mark.distributed
def test_killed_runs_leave_a_complete_checkpoint():
    """Three kills here; `tox run -e faults` makes more."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "3", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["lost"] == 0


def damage(path: Path, chance: random.Random) -> tuple[str, str]:
    """Do something bad to one file of a checkpoint; return its name and what was done."""
    file = chance.choice(sorted(path.iterdir()))
    kind = chance.choice(["flip", "flip", "flip", "truncate", "empty", "append", "remove", "link"])
    data = bytearray(file.read_bytes())
    if kind == "flip":
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
        file.write_bytes(data)
    elif kind == "truncate":
        file.write_bytes(data[: chance.randrange(len(data))])
    elif kind == "empty":
        file.write_bytes(b"")
    elif kind == "append":
        file.write_bytes(data + b"\0")
    elif kind == "remove":
        file.unlink()
    else:
        moved = path.with_name("moved")
        shutil.move(file, moved)
        file.symlink_to(moved)
    return file.name, kind


def test_thirty_corruptions_thirty_errors(tmp_path):
    """Each is named by file, and nothing is loaded, not even a scheduler's step."""
    model, optimizer = make()
    train(model, optimizer, range(2))
    save_checkpoint(tmp_path / "good", model, optimizer)
    other_model, other = make(seed=1)
    before = values(other_model), logical_state(other), other.state_dict()["param_groups"]
    chance = random.Random(3)  # noqa: S311 - the same damage again
    heard = []
    for index in range(30):
        bad = tmp_path / f"bad{index}"
        shutil.copytree(tmp_path / "good", bad)
        name, kind = damage(bad, chance)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(bad, other_model, other)
        assert str(bad) in str(caught.value)
        assert name.partition(".")[0] in str(caught.value)
        with pytest.raises(CheckpointError):
            verify_checkpoint(bad)
        heard.append(kind)
    assert len(heard) == 30
    assert same(values(other_model), before[0])
    assert same(logical_state(other), before[1])
    assert other.state_dict()["param_groups"] == before[2]


def test_a_file_size_limit_leaves_the_old_checkpoint(tmp_path):
    """The system refuses to write on: the error says so, the old checkpoint stays, nothing is left beside it."""
    model, optimizer = make(width=32)
    save_checkpoint(tmp_path / "last", model, optimizer, extra=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"could not save to .*last.*an older checkpoint at the path is unchanged"
        ):
            save_checkpoint(tmp_path / "last", model, optimizer, extra=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path):
    """A tmpfs that has room for one checkpoint, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=220k", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        model, optimizer = make(width=32)
        save_checkpoint(disk / "last", model, optimizer, extra=1)
        assert read_manifest(disk / "last").nbytes > 110_000
        for background in (False, True):
            with pytest.raises(CheckpointError, match="No space left on device"):
                _save(disk / "last", model, optimizer, background)
        assert load_checkpoint(disk / "last", model, optimizer).extra == 1
        assert [entry.name for entry in disk.iterdir()] == ["last"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_an_interrupted_background_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    """The writer dies after its first block; the error is heard at `result()`, the lock is free again."""
    model, optimizer = make()
    save_checkpoint(tmp_path / "last", model, optimizer, extra=1)
    with monkeypatch.context() as patched:
        patched.setattr("megaopt_checkpoint.writer.sum_of", _refuse)
        pending = save_checkpoint(tmp_path / "last", model, optimizer, extra=2, async_save=True)
        with pytest.raises(CheckpointError, match="the cable is out"):
            pending.result()
        assert pending.done()
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 1
    save_checkpoint(tmp_path / "last", model, optimizer, extra=3)
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 3


def _save(path: Path, model: nn.Module, optimizer: MegatronOptimizer, background: bool) -> None:
    pending = save_checkpoint(path, model, optimizer, extra=2, async_save=background)
    if background:
        pending.result()


def _refuse(*_: object) -> Never:
    raise OSError("the cable is out")
