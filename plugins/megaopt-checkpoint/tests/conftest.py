"""Helpers of these tests, which are not importable by name; torch's Adam stands in where no plugin is."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from training import stand_in


@pytest.fixture(scope="module", autouse=True)
def _an_adam() -> Iterator[None]:
    """Register torch's Adam and SGD if megaopt-adam is not there: checkpoints are the core's."""
    with stand_in():
        yield
