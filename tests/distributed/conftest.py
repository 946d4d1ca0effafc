"""The launcher of processes, as a fixture: test files are not importable by name."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import launch as start


@pytest.fixture
def launch() -> Callable[..., list[Any]]:
    """Run a function of the test's file on several ranks; see `launch.py`."""
    return start
