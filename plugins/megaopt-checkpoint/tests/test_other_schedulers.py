"""A scheduler takes the state of one of its kind."""

from pathlib import Path

import pytest
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from training import make, train, values

from megaopt_core.errors import CheckpointMismatchError

pytestmark = pytest.mark.any_python


def test_the_state_of_another_scheduler_is_refused(tmp_path: Path) -> None:
    """Torch would take it and have the settings of both; nothing changes."""
    model, optimizer = make()
    scheduler = StepLR(optimizer, step_size=2)
    train(model, optimizer, range(3))
    save_checkpoint(tmp_path / "last", model, optimizer, scheduler)
    other, another = make(seed=1)
    cosine = CosineAnnealingLR(another, T_max=10)
    before, state = values(other), cosine.state_dict()
    with pytest.raises(CheckpointMismatchError, match="has gamma, step_size, and lacks T_max, eta_min"):
        load_checkpoint(tmp_path / "last", other, another, cosine)
    assert cosine.state_dict() == state
    assert all(value.equal(before[name]) for name, value in values(other).items())


def test_other_settings_of_the_same_scheduler_are_loaded(tmp_path: Path) -> None:
    """A state may lack what a newer version of the scheduler has, and `strict=False` takes any."""
    model, optimizer = make()
    scheduler = StepLR(optimizer, step_size=2)
    save_checkpoint(tmp_path / "last", model, optimizer, scheduler)
    newer = StepLR(optimizer, step_size=5)
    newer.added = True
    load_checkpoint(tmp_path / "last", model, optimizer, newer)
    assert newer.step_size == 2
    load_checkpoint(tmp_path / "last", model, optimizer, CosineAnnealingLR(optimizer, T_max=10), strict=False)
