"""The page on split steps: its optimizer is one, and passes the check that the page shows."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "split-steps.md"


def test_the_optimizer_of_the_page_passes_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader copies the plugin into a file, and runs the lines below it."""
    own_part = PAGE.read_text().partition("## What a strategy writes")[0]
    plugin, check = re.findall(r"^```python\n(.*?)^```$", own_part, re.DOTALL | re.MULTILINE)
    module = ModuleType("normalized")
    exec(plugin, vars(module))  # noqa: S102 - running the example is the test
    monkeypatch.setitem(sys.modules, "normalized", module)
    exec(check, {})  # noqa: S102 - as above
