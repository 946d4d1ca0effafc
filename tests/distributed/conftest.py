"""The launcher of processes, as a fixture: test files are not importable by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launch import launch as start


@pytest.fixture
def launch():
    """Run a function of the test's file on several ranks; see `launch.py`."""
    return start
