"""Environments share compiled modules of one file, and of that file alone."""

import os
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from bytecode import give, take

pytestmark = pytest.mark.any_python


def _environment(folder: Path, cached: Path) -> Path:
    """Return a folder of packages that links a cached file, and has one that is its own."""
    (folder / "pack").mkdir(parents=True)
    os.link(cached, folder / "pack" / "linked.py")
    (folder / "pack" / "own.py").write_text("number = 1\n")
    return folder


@pytest.fixture(autouse=True)
def _beside_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytecode lies where tox's environments have it, whatever this run was told."""
    monkeypatch.setattr(sys, "pycache_prefix", None)


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    """A file as uv's cache has it."""
    path = tmp_path / "cached.py"
    path.write_text("number = 1\n")
    return path


def _compiled(source: Path) -> Path:
    return Path(cache_from_source(str(source)))


def test_bytecode_goes_from_one_environment_to_the_next(tmp_path: Path, cached: Path) -> None:
    """Of linked files; what an environment has of its own is compiled there."""
    first, second = (_environment(tmp_path / name, cached) for name in ("first", "second"))
    for name in ("linked.py", "own.py"):
        py_compile.compile(str(first / "pack" / name))
    store = tmp_path / "store"
    assert (give(first, store), give(first, store)) == (1, 0)
    assert (take(second, store), take(second, store)) == (1, 0)
    linked = _compiled(second / "pack" / "linked.py")
    assert linked.read_bytes() == _compiled(first / "pack" / "linked.py").read_bytes()
    assert not _compiled(second / "pack" / "own.py").exists()


def test_a_file_that_has_changed_takes_nothing(tmp_path: Path, cached: Path) -> None:
    """Another version is another file, even if it is as large and as old."""
    first = _environment(tmp_path / "first", cached)
    py_compile.compile(str(first / "pack" / "linked.py"))
    give(first, tmp_path / "store")
    other = tmp_path / "other.py"
    other.write_text("number = 2\n")
    time = cached.stat().st_mtime_ns
    os.utime(other, ns=(time, time))
    assert take(_environment(tmp_path / "second", other), tmp_path / "store") == 0


def test_bytecode_of_another_state_of_the_file_is_not_given(tmp_path: Path, cached: Path) -> None:
    """Python would compile it anew, and so would every other environment."""
    first = _environment(tmp_path / "first", cached)
    py_compile.compile(str(first / "pack" / "linked.py"))
    cached.write_text("number = 10\n")
    assert give(first, tmp_path / "store") == 0
