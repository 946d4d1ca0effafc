"""What a load reads is of one save, whatever happens at the path meanwhile."""

import os
import threading
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, loading, save_checkpoint
from megaopt_checkpoint.convert import consolidate
from megaopt_checkpoint.folder import HeldFolder
from megaopt_checkpoint.reader import CheckpointReader
from megaopt_checkpoint.restore.plan import LoadPlan
from torch import nn
from training import make

from megaopt_core.errors import CheckpointCorruptError, CheckpointError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python


def fill(model: nn.Module, optimizer: MegatronOptimizer, number: float) -> None:
    """Put one number everywhere."""
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
            for key in ("exp_avg", "exp_avg_sq"):
                optimizer.state[param][key].fill_(number)


def numbers(model: nn.Module, optimizer: MegatronOptimizer) -> set[float]:
    """Return the numbers that are anywhere."""
    found = set()
    for param in model.parameters():
        for tensor in (param, optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg_sq"]):
            found.update(tensor.detach().unique().tolist())
    return found


def save(path: Path, number: float) -> None:
    """Save a checkpoint of one number."""
    model, optimizer = make()
    fill(model, optimizer, number)
    save_checkpoint(path, model, optimizer, extra=[number, torch.full((3,), number)])


@pytest.mark.parametrize("step", ["plan_checkpoint", "check_files"])
def test_a_save_in_the_middle_of_a_load(tmp_path, monkeypatch, step):
    """A new checkpoint takes the path after the old one was opened or checked: the old one is loaded, all of it."""
    save(tmp_path / "last", 1)
    done = getattr(loading, step)

    def replaced(*args, **kwargs):
        result = done(*args, **kwargs)
        save(tmp_path / "last", 2)
        return result

    model, optimizer = make()
    with monkeypatch.context() as patched:
        patched.setattr(loading, step, replaced)
        report = load_checkpoint(tmp_path / "last", model, optimizer)
    assert numbers(model, optimizer) == {1.0}
    assert (report.extra[0], report.extra[1].tolist()) == (1, [1, 1, 1])
    load_checkpoint(tmp_path / "last", model, optimizer)
    assert numbers(model, optimizer) == {2.0}


def test_loads_beside_saves(tmp_path):
    """Sixty loads while another run saves to the path without a pause."""
    save(tmp_path / "last", 0)
    over = threading.Event()

    def keep_saving():
        number = 0
        model, optimizer = make()
        while not over.is_set():
            number += 1
            fill(model, optimizer, number)
            save_checkpoint(tmp_path / "last", model, optimizer, extra=number)

    thread = threading.Thread(target=keep_saving)
    thread.start()
    try:
        model, optimizer = make()
        for _ in range(60):
            load_checkpoint(tmp_path / "last", model, optimizer)
            assert len(numbers(model, optimizer)) == 1
    finally:
        over.set()
        thread.join()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_reader_and_a_conversion_hold_the_folder(tmp_path):
    """What was opened is read, also after the path has become another checkpoint."""
    save(tmp_path / "last", 1)
    reader = CheckpointReader(tmp_path / "last")
    reader._folder.open("rank-00000.bin")
    save(tmp_path / "last", 2)
    place = {"model.norm.weight": torch.zeros(8)}
    torch.distributed.checkpoint.load(place, storage_reader=reader, no_dist=True)
    assert place["model.norm.weight"].tolist() == [1.0] * 8
    reader.reset(tmp_path / "last")
    assert reader._folder.is_current
    consolidate(tmp_path / "last", tmp_path / "last.pt")
    assert torch.load(tmp_path / "last.pt", weights_only=True)["model"]["norm.weight"].tolist() == [2.0] * 8


def test_bytes_that_change_after_the_check(tmp_path, monkeypatch):
    """They are checked again while they are read."""
    save(tmp_path / "last", 1)
    file = tmp_path / "last" / "rank-00000.bin"
    done = LoadPlan.apply

    def changed(*args):
        with file.open("r+b") as opened:
            opened.write(b"\x77")
        done(*args)

    monkeypatch.setattr(LoadPlan, "apply", changed)
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin is damaged: .*partly loaded: load again"):
        load_checkpoint(tmp_path / "last", *make())
    load_checkpoint(tmp_path / "last", *make(), verify=False)


def test_a_folder_that_is_held(tmp_path):
    """Names do not move what is read; what was put in its place is not taken for it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"first")
    with HeldFolder(tmp_path / "a") as folder:
        assert folder.names() == {"x"}
        (tmp_path / "a").rename(tmp_path / "b")
        assert not folder.is_current
        assert folder.read("x", 100) == b"first"
        assert folder.read("y", 100) is None
        with pytest.raises(
            CheckpointCorruptError, match="y is gone: the checkpoint was replaced while it was"
        ):
            folder.open("y")
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        HeldFolder(tmp_path / "a")


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    """Files are opened again as they were; another one of the name is refused."""
    monkeypatch.setattr("megaopt_checkpoint.folder.MOST_OPEN", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    with HeldFolder(tmp_path) as folder:
        assert [folder.read(name, 100) for name in "abcab"] == [b"a", b"b", b"c", b"a", b"b"]
        (tmp_path / "new").write_text("d")
        (tmp_path / "new").rename(tmp_path / "c")
        with pytest.raises(CheckpointCorruptError, match="c was changed while it was read"):
            folder.read("c", 100)
        (tmp_path / "b").unlink()
        assert folder.read("b", 100) == b"b"


def test_pipes_and_links_are_not_opened(tmp_path):
    """A pipe does not let a load wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with HeldFolder(tmp_path) as folder:
        with pytest.raises(CheckpointCorruptError, match="pipe is no regular file"):
            folder.open("pipe")
        with pytest.raises(
            CheckpointCorruptError, match="link is a symbolic link, not a file of the checkpoint"
        ):
            folder.open("link")
