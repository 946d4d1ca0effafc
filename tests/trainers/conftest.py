"""The launcher of processes for tests of trainers, each of which has a folder and an environment of tox for itself."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

from launch import launch as start

# A folder is collected where it is named: no other environment has its trainer. There, a missing trainer is a failure.
collect_ignore = [folder.name for folder in Path(__file__).parent.iterdir() if folder.is_dir()]


@pytest.fixture
def launch() -> Callable[..., list[Any]]:
    """Run a function of the test's file on several ranks; see `tests/distributed/launch.py`."""
    return start
