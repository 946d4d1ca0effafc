"""One owner of the lock, whatever interrupts a save, and whatever lies where the lock should be."""

import builtins
import errno
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest
from megaopt_checkpoint import load_checkpoint, lock, save_checkpoint, saving, staging, verify_checkpoint
from torch import nn
from training import make

from megaopt_core.errors import CheckpointBusyError, CheckpointError, CheckpointWarning
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

TRACED = {module.__file__ for module in (lock, saving, staging)}
OPEN = Path("/proc/self/fd")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that is run in the traced files."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Self | None:
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(line: int, path: Path, model: nn.Module, optimizer: MegatronOptimizer) -> bool:
    """Save, interrupted at a line; return whether there was such a line."""
    trace = Interrupt(line)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        save_checkpoint(path, model, optimizer, extra=2, keep_last=2)
    finally:
        sys.settrace(before)
    return trace.left <= 0


@pytest.mark.parametrize("exists", [False, True])
def test_an_interrupt_at_any_line_of_a_save(tmp_path, exists):
    """The lock is free, nothing is left open, the path has the old checkpoint or the new one."""
    model, optimizer = make(width=4)
    path = tmp_path / "step-1"
    if exists:
        save_checkpoint(path, model, optimizer, extra=1)
    save_checkpoint(tmp_path / "other", model, optimizer)
    kept, line = [], 0
    count = len(list(OPEN.iterdir())) if OPEN.exists() else None
    while True:
        line += 1
        try:
            interrupted(line, path, model, optimizer)
            break
        except KeyboardInterrupt as error:
            kept.append(error)  # as an interactive session keeps the last error, with its frames
        if path.exists():
            assert verify_checkpoint(path).extra in {1, 2}
        else:
            assert not exists
        if count is not None:
            assert len(list(OPEN.iterdir())) == count
        with ExitStack() as held:
            staging.begin(path, held)
    assert len(kept) > 80
    assert load_checkpoint(path, model, optimizer).extra == 2
    assert {entry.name for entry in tmp_path.iterdir()} == {"step-1", "other"}


def test_a_planted_link_is_not_followed(tmp_path):
    """Neither its target nor a file that shares the lock's contents is overwritten, and no pipe is waited for."""
    model, optimizer = make()
    victim, planted = tmp_path / "victim", tmp_path / ".last.lock"
    victim.write_text("precious")
    planted.symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"\.last\.lock is a symbolic link, so it cannot be the lock"):
        save_checkpoint(tmp_path / "last", model, optimizer)
    planted.unlink()
    os.link(victim, planted)
    with pytest.raises(CheckpointError, match=r"\.last\.lock is no file of its own"):
        save_checkpoint(tmp_path / "last", model, optimizer)
    planted.unlink()
    os.mkfifo(planted)
    with pytest.raises(CheckpointError, match=r"\.last\.lock is no file of its own"):
        save_checkpoint(tmp_path / "last", model, optimizer)
    planted.unlink()
    planted.write_text("precious")
    with pytest.raises(CheckpointError, match=r"\.last\.lock holds something else"):
        save_checkpoint(tmp_path / "last", model, optimizer)
    assert victim.read_text() == planted.read_text() == "precious"
    planted.unlink()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".last.saving").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="cannot save to"):
        save_checkpoint(tmp_path / "last", model, optimizer)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / ".last.saving").unlink()
    save_checkpoint(tmp_path / "last", model, optimizer)


@pytest.fixture
def without_fcntl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module as it is where Python has no `fcntl`."""
    real = builtins.__import__

    def no_fcntl(name, *args, **kwargs):
        if name == "fcntl":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_fcntl)
    importlib.reload(lock)
    monkeypatch.setattr(staging, "take_lock", lock.take_lock)
    yield
    monkeypatch.undo()
    importlib.reload(lock)


def test_without_locks_of_the_system(tmp_path, without_fcntl):
    """The file itself is the lock; one that a killed run left is named."""
    model, optimizer = make()
    with ExitStack() as held:
        staging.begin(tmp_path / "last", held)
        with pytest.raises(CheckpointBusyError, match="this process is still saving to"):
            save_checkpoint(tmp_path / "last", model, optimizer)
    save_checkpoint(tmp_path / "last", model, optimizer, extra=3)
    assert {entry.name for entry in tmp_path.iterdir()} == {"last"}
    (tmp_path / ".last.lock").write_text("process 1 on elsewhere\n")
    with pytest.raises(
        CheckpointBusyError, match=r"process 1 on elsewhere.* If it was killed, remove .*\.last\.lock"
    ):
        save_checkpoint(tmp_path / "last", model, optimizer)
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 3


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("exists", [False, True])
def test_a_file_system_without_locks(tmp_path, monkeypatch, number, exists):
    """Saves and loads go on, said once: two runs are not told apart; any other fault is still one."""
    model, optimizer = make()
    if exists:
        save_checkpoint(tmp_path / "last", model, optimizer, extra=1)

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    monkeypatch.setattr(lock, "_TOLD", set())
    with pytest.warns(CheckpointWarning, match="has no locks: if two runs save to one path"):
        save_checkpoint(tmp_path / "last", model, optimizer, extra=2)
    save_checkpoint(tmp_path / "last", model, optimizer, extra=3)
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 3
    assert {entry.name for entry in tmp_path.iterdir()} == {"last"}
    number = errno.EIO
    with pytest.raises(CheckpointError, match=os.strerror(errno.EIO)):
        save_checkpoint(tmp_path / "last", model, optimizer)


def test_the_import_needs_no_fcntl():
    """In a process of its own, where importing it fails."""
    code = "import sys; sys.modules['fcntl'] = None; import megaopt_checkpoint.saving"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_load_waits_for_a_save_between_two_renames(tmp_path, monkeypatch):
    """The checkpoint under the hidden name is a running save's: it is not moved under its feet."""
    model, optimizer = make()
    save_checkpoint(tmp_path / "last", model, optimizer, extra=1)
    (tmp_path / "last").rename(tmp_path / ".last.previous")
    monkeypatch.setattr(staging, "_PATIENCE", 0.05)
    with ExitStack() as held:
        lock.take_lock(tmp_path / "last", held)
        with pytest.raises(CheckpointError, match="there is no checkpoint at"):
            load_checkpoint(tmp_path / "last", model, optimizer)
        assert (tmp_path / ".last.previous").exists()
    assert load_checkpoint(tmp_path / "last", model, optimizer).extra == 1
