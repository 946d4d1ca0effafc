"""Fifty short runs in which everything happens; the script takes hundreds of long ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).with_name("train_long.py")


def test_fifty_disturbed_runs_end_where_undisturbed_ones_do():
    """Bit for bit, in every precision, with steps that are skipped and resumes in between."""
    for package in ("megaopt_adam", "megaopt_lion", "megaopt_muon", "megaopt_checkpoint"):
        pytest.importorskip(package)
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "50", "--steps", "12", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (result["runs"], result["wrong"]) == (50, 0)
    assert all(result["events"][event] for event in ("saved_and_loaded", "swapped", "skipped steps"))
