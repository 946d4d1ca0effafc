"""A save holds one step: none begins in the middle of one."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch.distributed import checkpoint as dcp
from training import logical_state, make, same, train, values

from megaopt_core.errors import CheckpointError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

type Save = Callable[..., Any]

SAVES: dict[str, Save] = {
    "save_checkpoint": save_checkpoint,
    "async": lambda path, model, optimizer: save_checkpoint(path, model, optimizer, async_save=True),
    "state_dict": lambda path, model, optimizer: torch.save(optimizer.state_dict(), path),
    "dcp": lambda path, model, optimizer: dcp.save(
        {"optim": optimizer.checkpoint_state()}, checkpoint_id=path, no_dist=True
    ),
}


def inside(optimizer: MegatronOptimizer, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of the next steps, as a signal handler would."""
    (part,) = optimizer.parts
    step = part.inner.step

    def stepped(*args: Any) -> Any:
        action()
        return step(*args)

    monkeypatch.setattr(part.inner, "step", stepped)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_save_from_a_signal_handler_is_refused(tmp_path, monkeypatch, save) -> None:
    """With one sentence; the step goes on, and afterwards a save works."""
    model, optimizer = make()
    refused: list[str] = []

    def handler() -> None:
        with pytest.raises(CheckpointError, match="a save cannot begin inside a step") as caught:
            save(tmp_path / "last", model, optimizer)
        refused.append(str(caught.value))

    inside(optimizer, handler, monkeypatch)
    train(model, optimizer, [0])
    assert len(refused) == 1
    assert not (tmp_path / "last").exists()
    monkeypatch.undo()
    train(model, optimizer, [1])
    save(tmp_path / "last", model, optimizer)


def test_a_save_of_another_thread_waits_for_the_end_of_the_step(tmp_path, monkeypatch) -> None:
    """It holds the step that was under way, whole."""
    model, optimizer = make()
    train(model, optimizer, [0])
    errors: list[BaseException] = []

    def save() -> None:
        try:
            save_checkpoint(tmp_path / "last", model, optimizer)
        except BaseException as error:  # noqa: BLE001 - told in the other thread
            errors.append(error)

    saver = threading.Thread(target=save)

    def begin() -> None:
        saver.start()
        saver.join(timeout=0.5)
        assert saver.is_alive()

    inside(optimizer, begin, monkeypatch)
    train(model, optimizer, [1])
    saver.join(timeout=60)
    assert errors == []
    expected = values(model), logical_state(optimizer)
    other_model, other = make(seed=1)
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(values(other_model), expected[0])
    assert same(logical_state(other), expected[1])
