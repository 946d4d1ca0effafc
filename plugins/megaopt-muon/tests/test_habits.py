"""Habits of people who train, on a chain of Muon and Adam."""

from collections.abc import Callable

import pytest
import torch
from megaopt_muon.adaptive import TensorParallelAdaptiveMuon
from megaopt_muon.muon import TensorParallelMuon
from torch import nn

from megaopt_core import StepResult, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

SCHEDULERS = {
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6),
    "cyclic": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.1),
}


def net() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def train(
    model: nn.Module, optimizer: MegatronOptimizer, step: Callable[[], StepResult], steps: int = 3
) -> list[torch.Tensor]:
    """Train a little; return the parameters."""
    for _ in range(steps):
        model(torch.ones(2, 8)).square().sum().backward()
        assert step().update_successful
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("optimizer", ["muon", "adaptive_muon"])
def test_a_compiled_step_is_the_step(optimizer) -> None:
    """It falls back by itself."""
    plain, compiled = net(), net()
    first = build_optimizer(plain, optimizer, lr=0.01)
    second = build_optimizer(compiled, optimizer, lr=0.01)
    expected = train(plain, first, first.step)
    actual = train(compiled, second, torch.compile(second.step))
    assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_a_compiled_step_of_a_class_by_itself_is_the_step(cls) -> None:
    """As that of what is built, though nothing of the core is around it."""
    plain, compiled = (nn.Linear(8, 8, bias=False) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    first, second = (cls(model.parameters(), lr=0.01) for model in (plain, compiled))
    step = torch.compile(second.step)
    for _ in range(2):
        for model in (plain, compiled):
            model.weight.grad = model.weight.detach().sin()
        first.step()
        step()
    assert torch.equal(plain.weight, compiled.weight)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_with_their_defaults_cycle_momentum(kind) -> None:
    """Muon's momentum and Adam's first beta are the same in every step, and move."""
    model = net()
    optimizer = build_optimizer(model, "muon", lr=0.01)
    scheduler = SCHEDULERS[kind](optimizer)
    seen = []
    for _ in range(4):
        train(model, optimizer, optimizer.step, steps=1)
        muon, adam = (part.inner.param_groups[0] for part in optimizer.parts)
        assert muon["momentum"] == adam["betas"][0]
        seen.append(muon["momentum"])
        scheduler.step()
    assert len(set(seen)) == 4
