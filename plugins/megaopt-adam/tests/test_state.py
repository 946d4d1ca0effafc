"""State is there before the first step, laid out as torch lays it out, and goes from torch to megaopt and back."""

import io
from typing import Any

import pytest
import torch

from megaopt_core import build_optimizer

pytestmark = pytest.mark.any_python

CASES: dict[str, tuple[str, dict[str, Any], type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": ("adam", {}, torch.optim.AdamW, {}),
    "adamw": ("adamw", {}, torch.optim.AdamW, {}),
    "sgd": ("sgd", {}, torch.optim.SGD, {"momentum": 0.9}),
    "sgd without momentum": ("sgd", {"sgd_momentum": 0.0}, torch.optim.SGD, {}),
}


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2, bias=False))


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).reshape(3, 4).sin()).square().sum().backward()
    optimizer.step()


def _like_ours(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return torch groups with the parameters in the order of ours: matrices, then the bias without weight decay."""
    matrices = [param for param in model.parameters() if param.ndim > 1]
    return [{"params": matrices}, {"params": [model[0].bias], "weight_decay": 0.0}]


def _layout(state: dict[str, Any]) -> dict[str, tuple[torch.dtype, torch.Size, torch.device]]:
    return {key: (value.dtype, value.shape, value.device) for key, value in state.items()}


@pytest.mark.parametrize("case", CASES)
def test_state_before_the_first_step_is_laid_out_as_torchs_after_it(case: str) -> None:
    """Keys, dtypes, shapes and devices are the same, everything is zero, and building moved nothing."""
    name, settings, torch_cls, arguments = CASES[case]
    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, name, lr=0.1, **settings)
    expected = torch_cls(_like_ours(theirs), lr=0.1, fused=True, **arguments)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    _step(theirs, expected)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        state = {key: value for key, value in expected.state[other].items() if value is not None}
        assert _layout(dict(optimizer.state[mine])) == _layout(state)
        assert all(not value.any() for value in optimizer.state[mine].values())


@pytest.mark.parametrize("case", CASES)
def test_the_state_dict_has_torchs_layout(case: str) -> None:
    """Keys of state and of groups are torch's own, plus what megaopt adds to groups."""
    name, settings, torch_cls, arguments = CASES[case]
    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, name, lr=0.1, **settings)
    expected = torch_cls(_like_ours(theirs), lr=0.1, fused=True, **arguments)
    _step(ours, optimizer)
    _step(theirs, expected)
    mine, other = optimizer.state_dict(), expected.state_dict()
    assert set(mine) == set(other)
    filled = {
        index: state for index, state in other["state"].items() if any(v is not None for v in state.values())
    }
    assert {index: set(state) for index, state in mine["state"].items()} == {
        index: set(state) for index, state in filled.items()
    }
    for group, torch_group in zip(mine["param_groups"], other["param_groups"], strict=True):
        assert group["params"] == torch_group["params"]
        assert set(torch_group) <= set(group)
    assert [group["param_names"] for group in mine["param_groups"]] == [["0.weight", "2.weight"], ["0.bias"]]


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_from_torchs_state_dict_and_back(case: str) -> None:
    """Three steps by torch and three by megaopt, or the other way round, are six by torch."""
    name, settings, torch_cls, arguments = CASES[case]

    def make(ours: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = _model()
        if ours:
            return model, build_optimizer(model, name, lr=0.1, clip_grad=0.0, weight_decay=0.01, **settings)
        groups = _like_ours(model)
        groups[0]["weight_decay"] = 0.01
        return model, torch_cls(groups, lr=0.1, fused=True, **arguments)

    whole, optimizer = make(ours=False)
    for _ in range(6):
        _step(whole, optimizer)
    for ours_first in (True, False):
        first, optimizer = make(ours=ours_first)
        for _ in range(3):
            _step(first, optimizer)
        saved = io.BytesIO()
        torch.save(optimizer.state_dict(), saved)
        saved.seek(0)
        second, optimizer = make(ours=not ours_first)
        second.load_state_dict(first.state_dict())
        optimizer.load_state_dict(torch.load(saved, weights_only=True))
        for _ in range(3):
            _step(second, optimizer)
        for mine, other in zip(second.parameters(), whole.parameters(), strict=True):
            assert torch.equal(mine, other)
