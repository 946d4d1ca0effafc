"""The scripts of the examples for timm and accelerate train, save, and go on as the unbroken run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


def _lines(script: str, folder: Path, *arguments: str) -> list[str]:
    """Run a script in a folder, and return what it printed, line by line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLES / script / "train.py"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(("script", "saved"), [("timm", "run-1.pt"), ("accelerate", "run/1")])
def test_a_script_goes_on_where_it_was(script: str, saved: str, tmp_path: Path) -> None:
    """Muon steps hidden matrices, and the losses after the resume are those of the run before, digit for digit."""
    whole = _lines(script, tmp_path)
    assert any(line.startswith("muon ") for line in whole)
    losses = [line for line in whole if line.startswith("epoch ")]
    resumed = _lines(script, tmp_path, "--resume", saved, "--save", "again")
    assert [line for line in resumed if line.startswith("epoch ")] == losses[2:]
    assert float(losses[-1].split("loss ")[1].split(",")[0]) < float(
        losses[0].split("loss ")[1].split(",")[0]
    )
