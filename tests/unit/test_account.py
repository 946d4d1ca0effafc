"""The account of a run of tox: what was skipped, why, and what ran nowhere."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "account.py"
pytestmark = pytest.mark.any_python

CORE = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_runs" time="1.5"/>
<testcase classname="tests.unit.test_a" name="test_needs[adam]" time="0.0">
  <skipped message="could not import 'megaopt_adam': No module named 'megaopt_adam'">conftest.py:1</skipped>
</testcase>
<testcase classname="tests.unit.test_a" name="test_needs_a_gpu" time="0.0"><skipped message="no GPU"/></testcase>
<testcase classname="" name="tests.unit.test_b" time="0.0"><skipped message="collection skipped"/></testcase>
</testsuite></testsuites>"""
ADAM = """<testsuites><testsuite>
<testcase classname="tests.unit.test_a" name="test_needs[adam]" time="2.0"><failure message="no"/></testcase>
<testcase classname="tests.unit.test_b" name="test_runs" time="0.5"/>
</testsuite></testsuites>"""


def _account(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--slowest", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_everything_is_counted(tmp_path: Path) -> None:
    """By environment and by reason; a test that runs somewhere is no loss, one that runs nowhere is named."""
    for name, text in (("py312-core", CORE), ("py312-adam", ADAM)):
        (tmp_path / name / "log").mkdir(parents=True)
        (tmp_path / name / "log" / "tests.xml").write_text(text)
    lines = _account(tmp_path).stdout.splitlines()
    assert lines == [
        "| environment | tests | ran | skipped | failed | seconds of tests |",
        "|---|---|---|---|---|---|",
        "| py312-adam | 2 | 2 | 0 | 1 | 2 |",
        "| py312-core | 4 | 1 | 3 | 0 | 2 |",
        "| together | 6 | 3 | 3 | 1 | 4 |",
        "",
        "| skipped because | times | in |",
        "|---|---|---|",
        "| could not import 'megaopt_adam' | 1 | py312-core |",
        "| no GPU | 1 | py312-core |",
        "| collection skipped | 1 | py312-core |",
        "",
        "1 of 5 tests ran in no environment:",
        "",
        "- tests.unit.test_a::test_needs_a_gpu: no GPU",
        "",
        "| slowest | environments | seconds in all |",
        "|---|---|---|",
        "| tests.unit.test_a::test_needs[adam] | 1 | 2.0 |",
    ]


def test_nothing_to_count_is_said(tmp_path: Path) -> None:
    """With the command that helps."""
    ended = _account(tmp_path)
    assert ended.returncode == 1
    assert "run tox first" in ended.stderr
