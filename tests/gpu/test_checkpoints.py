"""Checkpoints of models on the device."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from device_training import PRECISIONS, build, everything, model_of, train

files = pytest.importorskip("megaopt_checkpoint")
pytest.importorskip("megaopt_adam")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("background", [False, True])
def test_from_the_device_to_it_and_to_a_cpu(
    device: torch.device, tmp_path: Path, background: bool, precision: str
) -> None:
    """The same bits on the device, and training goes on with them; a CPU loads them too."""
    if precision == "8bit":
        pytest.importorskip("megaopt_device")
    model = model_of(device, precision)
    optimizer = build(model, "adam", **PRECISIONS[precision])
    train(model, optimizer, range(3))
    pending = files.save_checkpoint(tmp_path / "last", model, optimizer, async_save=background)
    saved = everything(model, optimizer)
    train(model, optimizer, range(3, 6))
    if background:
        pending.result()
    for place in (device, torch.device("cpu")):
        other_model = model_of(place, precision)
        other = build(other_model, "adam", **PRECISIONS[precision])
        train(other_model, other, range(10, 12))  # what is loaded replaces other values and other state
        files.load_checkpoint(tmp_path / "last", other_model, other)
        loaded = everything(other_model, other)
        assert loaded.keys() == saved.keys()
        assert [name for name, value in saved.items() if not torch.equal(value, loaded[name])] == []
        if place == device:
            train(other_model, other, range(3, 6))
            now, expected = everything(other_model, other), everything(model, optimizer)
            assert [name for name, value in expected.items() if not torch.equal(value, now[name])] == []
