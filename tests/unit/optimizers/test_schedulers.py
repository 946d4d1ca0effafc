"""torch's own schedulers on single and chained optimizers."""

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from megaopt_core import ParamKey

pytestmark = pytest.mark.any_python

CHAIN = {
    ParamKey(name="0.weight"): {"optimizer": "t_sgd", "lr": 0.1},
    ParamKey(name="2.*"): {"optimizer": "t_momentum", "lr": 0.02},
    ParamKey(name="0.bias"): {"lr": 0.04},
}
SCHEDULERS = {
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 0.9**step),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=10),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=[group["lr"] for group in opt.param_groups], total_steps=12, cycle_momentum=False
    ),
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=2),
    "SequentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5),
    "SWALR": lambda opt: swa_utils.SWALR(opt, swa_lr=[0.5 * group["lr"] for group in opt.param_groups]),
}


def _advance(name: str, scheduler: Any) -> None:
    scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("overrides", [{}, CHAIN], ids=["single", "chain"])
def test_schedules_are_those_of_torchs_optimizers(mlp, build, give, name, overrides) -> None:
    """Every group has the learning rate that a torch optimizer with these groups would have, and steps with it."""
    model = mlp()
    optimizer = build(model, overrides=overrides)
    stand_in = torch.optim.SGD(
        [
            {"params": [torch.nn.Parameter(torch.ones(1))], "lr": group["lr"]}
            for group in optimizer.param_groups
        ],
        lr=1.0,
    )
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](stand_in)
    for step in range(8):
        give(model, step)
        optimizer.step()
        stand_in.step()
        for part in optimizer.parts:
            assert [group["lr"] for group in part.groups] == [
                group["lr"] for group in part.inner.param_groups
            ]
        _advance(name, ours)
        _advance(name, theirs)
        expected = [group["lr"] for group in stand_in.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "ReduceLROnPlateau"])
def test_ratios_between_groups_stay(mlp, build, give, name) -> None:
    """One schedule moves every group of a chain by the same factor."""
    model = mlp()
    optimizer = build(model, overrides=CHAIN)
    start = [group["lr"] for group in optimizer.param_groups]
    assert len(set(start)) == 3
    scheduler = SCHEDULERS[name](optimizer)
    for step in range(6):
        give(model, step)
        optimizer.step()
        _advance(name, scheduler)
    factors = [group["lr"] / first for group, first in zip(optimizer.param_groups, start, strict=True)]
    assert factors == pytest.approx([factors[0]] * len(factors), rel=1e-9)
    assert factors[0] < 1.0


def test_momentum_cycles_where_groups_have_one(mlp, build, give) -> None:
    """OneCycleLR moves beta1 of an Adam, on a chain too, and the momentum of the others."""
    optimizer = build(mlp())
    lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    assert optimizer.param_groups[0]["betas"][0] == 0.95
    model = mlp()
    chain = build(model, overrides=CHAIN)
    scheduler = lr_scheduler.OneCycleLR(chain, max_lr=0.1, total_steps=10)
    seen = []
    for step in range(3):
        give(model, step)
        chain.step()
        scheduler.step()
        inner = [group for part in chain.parts for group in part.inner.param_groups]
        (rate,) = {group["betas"][0] if "betas" in group else group["momentum"] for group in inner}
        seen.append(rate)
    assert seen[0] == 0.95
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 3


def test_resuming_a_scheduler_and_its_optimizer(mlp, build, give) -> None:
    """Both state dicts together continue the run bit for bit."""
    runs = []
    for resume in (False, True):
        model = mlp()
        optimizer = build(model, overrides=CHAIN)
        scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer)
        for step in range(6):
            if resume and step == 3:
                saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
                model = mlp(seed=5)
                optimizer = build(model, overrides=CHAIN)
                scheduler = SCHEDULERS["CosineAnnealingLR"](optimizer)
                for target, state in zip((model, optimizer, scheduler), saved, strict=True):
                    target.load_state_dict(state)
            give(model, step)
            optimizer.step()
            scheduler.step()
        runs.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
