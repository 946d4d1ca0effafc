"""A text of a few kilobytes, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from megaopt_testing.fake_plugins import plugins
from megaopt_tools import main

__all__ = ["letters", "megaopt", "plugins"]

type Megaopt = Callable[..., int]

SMALL = ("--threads", "1", "--batch-size", "2", "--context", "16")


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A text with something to learn: the same sentence over and over."""
    path = tmp_path / "letters.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 60)
    return path


@pytest.fixture
def megaopt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: Path) -> Megaopt:
    """Run a command on the small text, in an empty folder; options that are given win."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        command, *rest = arguments
        return main([command, *SMALL, "--text", letters.name, *rest])

    return run
