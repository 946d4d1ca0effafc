"""A step without any gradient is warned of once; gradients in buffers are always there."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import FP32Optimizer, OptimizerConfig, build_optimizer
from megaopt_core.errors import GradientError

pytestmark = pytest.mark.any_python

SAID = "no parameter has a gradient, and the step changes none.*copy.deepcopy"


def made(**settings: Any) -> tuple[nn.Module, Any]:
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model = model.to(torch.bfloat16) if settings.get("bf16") else model
    return model, build_optimizer(model, "t_sgd", lr=0.1, **settings)


def train_a_copy(model: nn.Module, optimizer: Any) -> None:
    """Compute gradients of a copy."""
    copy.deepcopy(model)(torch.ones(1, 3, dtype=model[0].weight.dtype)).sum().backward()


def forget_backward(model: nn.Module, optimizer: Any) -> None:
    """Compute a loss and nothing else."""
    model(torch.ones(1, 3, dtype=model[0].weight.dtype)).sum()


def clear_too_late(model: nn.Module, optimizer: Any) -> None:
    """Clear what the backward pass has computed."""
    model(torch.ones(1, 3, dtype=model[0].weight.dtype)).sum().backward()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", [train_a_copy, forget_backward, clear_too_late])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"clip_grad": 0.0}])
def test_a_step_without_a_gradient_is_warned_of_once(how, settings):
    """Whatever the reason is; the report says it too, and stops saying it."""
    model, optimizer = made(**settings)
    how(model, optimizer)
    with pytest.warns(UserWarning, match=SAID):
        optimizer.step()
    assert "0 of 4 (no parameter had a gradient)" in str(optimizer.report(after_step=True))
    how(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        model(torch.ones(1, 3, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()
    assert "4 of 4 (" in str(optimizer.report(after_step=True))
    assert "no parameter had" not in str(optimizer.report(after_step=True))


def test_trainers_that_drive_the_stages_are_warned_too():
    """Without a norm as with one."""
    _, optimizer = made()
    with pytest.warns(UserWarning, match=SAID):
        optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


@pytest.mark.parametrize("where", ["the first", "the last", "a twin", "a buffer"])
def test_one_gradient_is_enough(where):
    """Anywhere, zeros too; buffers have one in any case."""
    model, optimizer = made()
    if where == "a buffer":
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
    elif where == "a twin":
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        model[1].weight = nn.Parameter(model[0].weight.data)
        optimizer = build_optimizer(model, "t_sgd", lr=0.1)
        model[1].weight.grad = torch.ones(3, 3)
    else:
        param = list(model.parameters())[0 if where == "the first" else -1]
        param.grad = torch.zeros_like(param)
    optimizer.step()


def test_an_optimizer_that_was_wrapped_by_hand_is_watched_too():
    """And one whose parameters were all frozen."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = FP32Optimizer(torch.optim.SGD([weight], lr=0.1), OptimizerConfig(lr=0.1))
    weight.grad = torch.ones(2)
    weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=SAID):
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("shape", [(8,), (1, 8), (12, 1), (8, 12), (96,), (), (2, 12, 8), (1,)])
@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_a_main_grad_of_another_shape_is_refused(shape, settings):
    """Nothing is broadcast, nothing is viewed otherwise; the error names the parameter, and nothing has moved."""
    model = nn.Linear(8, 12)
    model = model.to(torch.bfloat16) if settings else model
    optimizer = build_optimizer(model, "t_adam", lr=0.1, **settings)
    before = model.weight.detach().clone()
    for param in model.parameters():
        param.main_grad = torch.ones(param.shape)
    optimizer.step()
    after = model.weight.detach().clone()
    assert not torch.equal(before, after)
    model.weight.main_grad = torch.ones(shape)
    for _ in range(2):
        with pytest.raises(
            GradientError, match=r"'weight' has a main_grad of shape .* of shape \(12, 8\)"
        ) as caught:
            optimizer.step()
        assert caught.value.names == ("weight",)
        assert torch.equal(model.weight, after)
    model.weight.main_grad = torch.ones(12, 8)
    optimizer.step()
    assert not torch.equal(model.weight, after)
