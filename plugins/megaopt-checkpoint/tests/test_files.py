"""Locks, moves, and what an interrupted save leaves."""

import multiprocessing
import re
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_checkpoint.files import exchange
from megaopt_checkpoint.memory import bytes_of
from megaopt_checkpoint.staging import begin
from training import make

from megaopt_core.errors import CheckpointBusyError

HELD = ExitStack()


def hold(path: Path, connection: Connection) -> None:
    """Take the lock in another process until told to let go."""
    begin(path, HELD)
    connection.send("held")
    connection.recv()


def test_two_runs_on_one_path_are_told(tmp_path):
    """The second hears which process is the first; a killed run holds nothing."""
    model, optimizer = make()
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("forkserver").Process(target=hold, args=(tmp_path / "last", theirs))
    other.start()
    assert ours.recv() == "held"
    words = rf"another run is saving to .*last at this moment \(process {other.pid} on "
    with pytest.raises(CheckpointBusyError, match=words):
        save_checkpoint(tmp_path / "last", model, optimizer)
    save_checkpoint(tmp_path / "elsewhere", model, optimizer)
    other.kill()
    other.join()
    assert (tmp_path / ".last.saving").exists()
    save_checkpoint(tmp_path / "last", model, optimizer)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "last"]


def test_a_background_save_is_waited_for(tmp_path, monkeypatch):
    """A second save to the same path says so; `result` has a time limit."""
    model, optimizer = make()
    with ExitStack() as held:
        begin(tmp_path / "last", held)
        with pytest.raises(CheckpointBusyError, match=re.escape("`pending.result()`")):
            save_checkpoint(tmp_path / "last", model, optimizer, async_save=True)
    pending = save_checkpoint(tmp_path / "last", model, optimizer, async_save=True)
    pending.result(60)
    assert pending.done()
    assert pending.path == tmp_path / "last"


def test_where_names_cannot_be_exchanged(tmp_path, monkeypatch):
    """Two renames do it, and the next load or save brings back what a kill between them hid."""
    model, optimizer = make()
    monkeypatch.setattr("megaopt_checkpoint.staging.exchange", lambda *_: False)
    save_checkpoint(tmp_path / "last", model, optimizer, extra=1)
    save_checkpoint(tmp_path / "last", model, optimizer, extra=2)
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 2
    (tmp_path / "last").rename(tmp_path / ".last.previous")
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 2
    (tmp_path / "last").rename(tmp_path / ".last.previous")
    save_checkpoint(tmp_path / "last", model, optimizer, extra=3)
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["last"]


def test_exchange_swaps_or_says_no(tmp_path):
    """Both paths exist before and after."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    swapped = exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / ("b" if swapped else "a")).exists()
    assert not exchange(tmp_path / "a", tmp_path / "gone")


def test_bytes_are_those_of_the_memory_and_keep_it():
    """Of every dtype, without a copy."""
    assert bytes(bytes_of(torch.arange(3, dtype=torch.int16))) == b"\0\0\1\0\2\0"
    assert bytes(bytes_of(torch.ones(2, dtype=torch.bfloat16))) == b"\x80\x3f\x80\x3f"
    assert bytes(bytes_of(torch.ones((), dtype=torch.float8_e4m3fn))) == b"\x38"
    assert bytes(bytes_of(torch.empty(0))) == b""
    tensor = torch.zeros(2, dtype=torch.uint8)
    bytes_of(tensor)[1] = 7
    assert tensor.tolist() == [0, 7]
