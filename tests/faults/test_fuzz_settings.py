"""A hundred wrong settings, overrides, values, models, lists, paths...; the script takes hundreds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.any_python

SCRIPT = Path(__file__).with_name("fuzz_settings.py")


def test_a_hundred_wrong_inputs_give_a_hundred_clear_errors():
    """Each error is ours, names what was given, and says what is allowed."""
    pytest.importorskip("megaopt_adam")
    pytest.importorskip("megaopt_checkpoint")
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), "--inputs", "100", "--seed", "11"],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("seed 11")
    result = json.loads(ended.stdout.splitlines()[-1])
    assert (sum(result["clear"].values()), result["wrong"]) == (100, 0)
