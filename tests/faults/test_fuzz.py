"""Fifty manifests of strangers and fifty flipped bits; the script takes thousands."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).with_name("fuzz_checkpoints.py")


def test_fifty_of_each():
    """Named errors or right values, nothing half changed, nothing opened outside."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--manifests", "50", "--flips", "50", "--seed", "7"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("seed 7")
    result = json.loads(ended.stdout)
    assert sum(result["manifests"].values()) == 50
    assert result["flips"] == {"CheckpointCorruptError": 50}
