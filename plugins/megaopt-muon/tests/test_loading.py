"""What Muon's classes refuse of a state dict, and that nothing of it is taken then."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon

from megaopt_core.errors import ConfigurationError, StateDictError

pytestmark = pytest.mark.any_python

type Make = Callable[..., torch.optim.Optimizer]
CLASSES = [TensorParallelMuon, TensorParallelAdaptiveMuon]


def after(steps: int, make: Make, **settings: Any) -> torch.optim.Optimizer:
    """Return an optimizer of one matrix after some steps."""
    param = torch.nn.Parameter(torch.ones(6, 8))
    optimizer = make([param], lr=0.125, **settings)
    for _ in range(steps):
        param.grad = torch.eye(6, 8)
        optimizer.step()
    return optimizer


def refused(
    optimizer: torch.optim.Optimizer, saved: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Assert that a state dict is refused, and that nothing has changed."""
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=match):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("steps", [0, 1])
def test_the_state_of_another_kind_of_optimizer_is_refused(cls: Make, steps: int) -> None:
    """When it is loaded: its groups have no momentum."""
    saved = after(steps, torch.optim.AdamW).state_dict()
    refused(after(1, cls), saved, StateDictError, "group 0 has no 'momentum' but .*'betas'")


@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_without_momentum_is_refused(cls: Make) -> None:
    """Also where groups have been made to fit."""
    saved = after(1, torch.optim.AdamW).state_dict()
    saved["param_groups"][0]["momentum"] = 0.5
    refused(after(1, cls), saved, StateDictError, r"\(6, 8\) has no 'momentum_buffer' .*exp_avg")


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", -1.0), ("lr", "0.5"), ("momentum", 1.0), ("weight_decay", float("nan")), ("ns_plan", "x")],
)
def test_a_group_that_is_loaded_is_checked(cls: Make, key: str, value: object) -> None:
    """As one that is added."""
    saved = after(1, cls).state_dict()
    saved["param_groups"][0][key] = value
    refused(after(1, cls), saved, ConfigurationError, f"^{key}=")


@pytest.mark.parametrize("method", ["normuon", "namo"])
def test_another_second_moment_is_refused(method: str) -> None:
    """Its shape tells."""
    saved = after(1, TensorParallelAdaptiveMuon, moment2_method=method).state_dict()
    refused(
        after(1, TensorParallelAdaptiveMuon), saved, StateDictError, r"'moment2_buffer'.*must be \(6, 8\)"
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_what_torch_saves_of_muon_is_taken(cls: Make) -> None:
    """Its momentum is the same average."""
    saved = after(1, torch.optim.Muon)
    optimizer = after(0, cls)
    optimizer.load_state_dict(saved.state_dict())
    (momentum,) = (state["momentum_buffer"] for state in optimizer.state.values())
    (expected,) = (state["momentum_buffer"] for state in saved.state.values())
    assert torch.equal(momentum, expected)
