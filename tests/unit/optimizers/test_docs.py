"""The pages about steps and precision: their examples run, and their tables name what exists."""

import doctest
import re
from pathlib import Path

import pytest

from megaopt_core.execution._stages import STAGES

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", ["stepping.md", "precision.md"])
def test_examples_run(page: str) -> None:
    """Every pycon block, from top to bottom; those about steps build an optimizer."""
    if page == "stepping.md":
        pytest.importorskip("megaopt_adam")
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert (result.failed, result.attempted > 5) == (0, True)


def test_every_stage_is_in_the_table_in_order() -> None:
    """Names of timers and profiler ranges are those that the code uses."""
    rows = re.findall(r"^\| .* \| `([\w-]+)` \|$", (DOCS / "stepping.md").read_text(), re.MULTILINE)
    assert rows == list(STAGES)
