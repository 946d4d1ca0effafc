"""The gallery says of every optimizer what the installed kit says."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from megaopt_testing import CHECKS

from megaopt_core import get_registry

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gallery.md"
if not PAGE.exists():
    pytest.skip("the documentation is not beside these tests", allow_module_level=True)

for _plugin in ("adam", "lion", "muon", "soap"):
    pytest.importorskip(f"megaopt_{_plugin}")

RESULTS = ROOT / "benchmarks" / "results"
NAMES = list(tomllib.loads((ROOT / "benchmarks" / "gallery.toml").read_text()))
TEXT = PAGE.read_text()


def test_every_optimizer_of_ours_is_there() -> None:
    """The page has a section for each that is installed with megaopt, and no other."""
    ours = set(get_registry().optimizers())
    assert set(NAMES) == ours
    assert re.findall(r"^## (\w+)$", TEXT, re.MULTILINE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_section_has_the_kits_result(name: str) -> None:
    """The number of checks is that of the kit: `benchmarks/gallery.py --kit` makes them again."""
    result = json.loads((RESULTS / "kit.json").read_text())[name]
    section = TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]
    assert f"| conformance kit | {result} |" in section
    made, count, failed = map(int, re.match(r"ran (\d+) of (\d+) checks, (\d+) failed", result).groups())
    assert (count, failed) == (len(CHECKS), 0)
    assert made >= count - 4
