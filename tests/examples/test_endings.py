"""How scripts for several ranks end."""

import re

import pytest
from pages import EXAMPLES, ROOT

END = re.compile(r"^(?P<before>.*)\n *(?:torch\.distributed|dist)\.destroy_process_group\(\)$", re.MULTILINE)
WITH_RANKS = sorted(
    path
    for path in [
        *EXAMPLES.rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "plugins").glob("*/README.md"),
    ]
    if "destroy_process_group()\n" in path.read_text()
)


@pytest.mark.parametrize("path", WITH_RANKS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_script_waits_for_all_ranks_before_it_ends(path):
    """Python must not end while a thread of gloo holds a tensor: that aborts the process."""
    endings = [found["before"].strip(" +-") for found in END.finditer(path.read_text())]
    assert all(re.fullmatch(r"(torch\.distributed|dist)\.barrier\(\)", before) for before in endings)


def test_there_are_such_scripts():
    """Examples and pages both."""
    assert {path.suffix for path in WITH_RANKS} == {".py", ".md"}
