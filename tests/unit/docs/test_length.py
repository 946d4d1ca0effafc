"""A page of the documentation is short enough to be read at one sitting."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

DOCS = Path(__file__).parents[3] / "docs"
GENERATED = {"bridge-classes.md"}
"""Tables that a script writes, to be searched and not read."""
MOST = 250


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_at_most_250_lines(page: Path) -> None:
    """A longer one is two pages."""
    if page.name not in GENERATED:
        assert len(page.read_text().splitlines()) <= MOST
