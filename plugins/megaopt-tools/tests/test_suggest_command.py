"""`megaopt suggest`: AdamW's settings become Muon's, by one rule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from megaopt_tools import main
from megaopt_tools.rates import Tuned, suggested_settings

from megaopt_core import build_optimizer

pytestmark = pytest.mark.any_python

MODEL = """
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 50))

def vectors():
    return nn.LayerNorm(8)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MODEL)


def _settings(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    assert main(["suggest", *arguments, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_the_lines_can_be_pasted(capsys) -> None:
    """They build an optimizer whose matrices take four times AdamW's rate, and the rest AdamW's."""
    assert main(["suggest", "--adamw-lr", "3e-3"]) == 0
    lines, _, words = capsys.readouterr().out.partition("\n\n")
    assert lines == (
        'optimizer = build_optimizer(\n    model,\n    "muon",\n    lr=0.012,\n    weight_decay=0.025,\n'
        "    muon_extra_scale_factor=0.2,\n    muon_scalar_lr=0.003,\n    muon_scalar_weight_decay=0.1,\n)"
    )
    assert "Matrices take 4 times AdamW's rate" in words
    names = {
        "model": torch.nn.TransformerEncoderLayer(d_model=32, nhead=2),
        "build_optimizer": build_optimizer,
    }
    exec(lines, names)  # noqa: S102 - what a user would paste
    groups = {
        group["params"][0].dim(): (group["lr"], group["max_lr"]) for group in names["optimizer"].param_groups
    }
    assert groups == {2: (0.012, 0.012), 1: (0.003, 0.003)}


def test_decay_of_a_step_stays_that_of_adamw() -> None:
    """The product of rate and weight decay is the same for matrices and for the rest."""
    found = suggested_settings(Tuned(2e-3, weight_decay=0.08))
    assert found["lr"] * found["weight_decay"] == pytest.approx(2e-3 * 0.08)
    assert found["muon_scalar_lr"] * found["muon_scalar_weight_decay"] == pytest.approx(2e-3 * 0.08)


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 256)])
def test_a_step_of_muon_is_four_of_adamw(shape: tuple[int, int]) -> None:
    """Its root mean square is 0.2 times the rate, for every shape: Newton-Schulz leaves singular values near 1."""
    torch.manual_seed(0)
    settings = suggested_settings(Tuned(1e-3, weight_decay=0.0))
    model = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False), torch.nn.Linear(shape[0], 3))
    weight = model[0].weight
    before = weight.detach().clone()
    optimizer = build_optimizer(model, "muon", **settings)
    weight.grad = torch.randn(shape)
    optimizer.step()
    rms = (weight.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(4 * 1e-3 * 0.2, rel=0.2)


def test_rate_falls_with_the_width_and_grows_with_the_root_of_the_batch(capsys) -> None:
    """As the published rules for AdamW say; the text names the rate that was taken."""
    wider = _settings(capsys, "--adamw-lr", "4e-3", "--adamw-width", "256", "--width", "512")
    assert (wider["lr"], wider["muon_scalar_lr"]) == (0.008, 0.002)
    larger = _settings(capsys, "--adamw-lr", "1e-3", "--adamw-batch", "64", "--batch", "256")
    assert (larger["lr"], larger["muon_scalar_lr"]) == (0.008, 0.002)
    assert main(["suggest", "--adamw-lr", "1e-3", "--adamw-batch", "64", "--batch", "256"]) == 0
    assert "AdamW's rate 0.001 is taken as 0.002 here" in capsys.readouterr().out


def test_a_model_tells_its_width_and_who_steps_it(capsys) -> None:
    """The factory is called as `explain` calls it."""
    model = ("my_model.py:build", "--adamw-lr", "1e-3")
    assert main(["suggest", *model]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("my_model.py:build: width ")
    assert "muon steps 2 parameters (4,096 elements)" in last
    found = _settings(capsys, *model, "--adamw-width", "16")
    assert found["muon_scalar_lr"] in (1e-3 * 16 / 32, 1e-3 * 16 / 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--width", "64"), "--width 64: give --adamw-width too, which AdamW's rate was found at"),
        (
            ("--adamw-width", "64"),
            "--adamw-width 64: give --width or a model too, which the new run has",
        ),
        (("--adamw-batch", "64"), "--adamw-batch 64: give --batch too, which the new run has"),
        (("my_model.py:vectors",), "my_model.py:vectors: the model has no matrix that Muon would step"),
        (("my_model.py:nothing",), "'my_model.py:nothing': my_model.py has no 'nothing'"),
    ],
)
def test_bad_input_gives_one_message(capsys, arguments: tuple[str, ...], message: str) -> None:
    """Nothing is printed but the message."""
    assert main(["suggest", *arguments, "--adamw-lr", "1e-3"]) == 2
    assert capsys.readouterr() == ("", f"megaopt: error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --adamw-lr"),
        (("--adamw-lr", "0"), "argument --adamw-lr: must be a number above 0, got '0'"),
        (("--adamw-lr", "nan"), "argument --adamw-lr: must be a number above 0, got 'nan'"),
        (("--adamw-lr", "fast"), "argument --adamw-lr: must be a number above 0, got 'fast'"),
        (
            ("--adamw-lr", "1", "--weight-decay", "-1"),
            "argument --weight-decay: must be a number of at least 0, got '-1'",
        ),
    ],
)
def test_numbers_are_checked_as_they_are_read(capsys, arguments: tuple[str, ...], message: str) -> None:
    """Argparse says which option is wrong."""
    with pytest.raises(SystemExit) as stop:
        main(["suggest", *arguments])
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"megaopt suggest: error: {message}\n")
