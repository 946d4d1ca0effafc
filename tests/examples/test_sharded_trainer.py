"""The Trainer's example as it goes where accelerate shards: on two ranks whose accelerator is the CPU."""

from pathlib import Path

import pytest
from pages import EXAMPLES, run_script

NEEDED = ("accelerate", "transformers", "megaopt_fsdp", "megaopt_muon")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_trainer_shards_the_model_and_the_optimizer_follows(tmp_path: Path) -> None:
    """The optimizer steps what `fully_shard` has left, the loss is that of copies, and checkpoints are written."""
    for module in NEEDED:
        pytest.importorskip(module)
    script, through = EXAMPLES / "fsdp_trainer" / "train.py", Path(__file__).parent / "sharded_on_cpus.py"
    printed = run_script(f"torchrun --nproc-per-node 2 {through} {script}", tmp_path)
    assert "sent in last step" in printed
    (last,) = [line for line in printed.splitlines() if line.startswith("step 20: mean loss")]
    assert float(last.split()[-1]) == pytest.approx(3.37, abs=0.02)
    assert list((tmp_path / "trainer" / "checkpoint-20").glob("optimizer*"))
