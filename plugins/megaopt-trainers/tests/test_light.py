"""Trainers are imported by nobody but their users."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import megaopt_trainers, torch
from megaopt_core import get_registry
import megaopt_trainers.plugin as plugin
import megaopt_trainers.midrun, megaopt_trainers.peft, megaopt_trainers.timm, megaopt_trainers.whole_states
assert plugin.megaopt_process_groups([torch.nn.Linear(1, 1)]) is None
assert get_registry().load() is None
trainers = {"megatron", "torchtitan", "transformers", "accelerate", "lightning", "peft", "timm"}
print(sorted(trainers.intersection(name.partition(".")[0] for name in sys.modules)))
"""


@pytest.mark.any_python
def test_no_trainer_is_imported() -> None:
    """Neither by the package, nor by its plugin, nor by its hook for a model of nobody's."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
