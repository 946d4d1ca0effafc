"""Processes that save FSDP2's states by torch's functions end, and what they saved goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).parent / "saves_under_fsdp2.py"
ABORTED_AT_THE_END = "terminate called without an active exception"
"""What the C++ runtime says where Python has ended before a thread of torch's gloo has (pytorch issue 190489)."""


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_both_ranks_end(tmp_path: Path, kind) -> None:
    """With states that are not flattened, and without `destroy_process_group`; losses go on to the bit."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = [*torchrun, str(SCRIPT), kind, str(tmp_path / "saved")]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0 or ABORTED_AT_THE_END in ended.stderr, ended.stderr
    assert ended.stdout.splitlines().count("the same loss") == 2
    assert (tmp_path / "saved" / ".metadata").exists()
