"""The example of the page is torchtitan's own usage but for a few lines; it learns, saves and goes on."""

import difflib
import os
import sys
from pathlib import Path

import pytest
import titan_on_cpu  # noqa: F401 - before torchtitan
import torch
from torchtitan import train
from torchtitan.components.metrics import MetricsProcessor

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "torchtitan"


def _run(rank: int, size: int, folder: str, module: str, *arguments: str) -> dict[int, float]:
    """Do what `torchrun -m torchtitan.train` does, in a folder; return the losses that torchtitan logs."""
    losses = {}
    MetricsProcessor.log = lambda self, step, loss, *args, **kwargs: losses.update({step: loss})
    torch.distributed.destroy_process_group = lambda *_: None  # the launcher's
    sys.path.insert(0, str(EXAMPLE))
    os.chdir(folder)
    sys.argv = ["train.py", "--module", module, "--config", "count", *arguments]
    train.main()
    return losses


def test_it_learns_to_count(launch, tmp_path) -> None:
    """As before, from the same start."""
    for module in ("before", "after"):
        (tmp_path / module).mkdir()
    before, after = (launch(_run, 2, str(tmp_path / module), module)[0] for module in ("before", "after"))
    assert before[1] == after[1]
    assert max(before[20], after[20]) < 0.1


def test_it_goes_on_from_its_checkpoint(launch, tmp_path) -> None:
    """To the bit where the ranks are as many, and on twice as many; settings come from the command line."""
    arguments = ("after", "--optimizer.lr", "2e-3", "--training.global_batch_size", "8")
    whole = launch(_run, 2, str(tmp_path), *arguments)[0]
    again = launch(_run, 2, str(tmp_path), *arguments, "--checkpoint.load_step", "10")[0]
    assert again == {step: loss for step, loss in whole.items() if step > 10}
    arguments = (*arguments, "--checkpoint.load_step", "10", "--training.local_batch_size", "2")
    elsewhere = launch(_run, 4, str(tmp_path), *arguments)[0]
    assert elsewhere.keys() == again.keys()
    assert all(loss < whole[10] for loss in elsewhere.values())


def test_the_page_shows_what_changes() -> None:
    """In at most eight lines."""
    before, after = ((EXAMPLE / f"{name}.py").read_text().splitlines() for name in ("before", "after"))
    lines = list(difflib.unified_diff(before, after, "before.py", "after.py", lineterm=""))
    assert "```diff\n" + "\n".join(lines) + "\n```" in (ROOT / "docs" / "torchtitan.md").read_text()
    changed = [line for line in lines[2:] if line.startswith("+")]
    assert len(changed) <= 8
