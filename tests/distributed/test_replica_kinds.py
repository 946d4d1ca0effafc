"""Ranks compare frozen parameters, state, settings of groups and buffers too, also of what was wrapped by hand."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from launch import launch
from torch import nn

from megaopt_core import (
    ChainedOptimizer,
    FP32Optimizer,
    MixedPrecisionOptimizer,
    OptimizerConfig,
    StepResult,
    build_optimizer,
)
from megaopt_core.errors import RankMismatchError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class Net(nn.Module):
    """A frozen layer, one that trains, a buffer, and statistics that every rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.base.requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0))


def trained(optimizer: MegatronOptimizer, model: nn.Module) -> StepResult:
    """Step once with the same gradients on all ranks."""
    for param in model.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    return optimizer.step()


def nothing(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Change nothing."""


def frozen_weight(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Change one element of a frozen weight."""
    with torch.no_grad():
        model.base.weight[1, 2] += 1.0


def state(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Change the first moment of a weight, as a load on one rank does."""
    optimizer.state[model.head.weight]["exp_avg"] = torch.full((4, 4), 0.5)


def learning_rate(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Set another learning rate, as a scheduler on one rank does."""
    optimizer.param_groups[0]["lr"] = 0.7


def buffer(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Change one element of a buffer."""
    model.table[3] = 9.0


def statistics(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Change running statistics."""
    model.norm.running_mean[0] = 3.0


CHANGES = {
    change.__name__: change for change in (nothing, frozen_weight, state, learning_rate, buffer, statistics)
}
AT_THE_FIRST_STEP = {
    "frozen_weight": "frozen parameter 'base.weight': norm ",
    "state": "state 'exp_avg' of 'head.weight': norm ",
    "learning_rate": "param group 0 lr: 0.1 on rank 0; 0.7 on rank 1",
}
IN_CHECK = {**AT_THE_FIRST_STEP, "buffer": "buffer 'table': norm "}


def changes(
    rank: int, size: int, names: Iterable[str], settings_of: Mapping[str, Any]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return for each change on one rank what the first step raises, and what `check()` says after a step."""
    answers = []
    for name in names:
        torch.manual_seed(0)
        model = Net().to(settings_of.get("dtype", torch.float32))
        options = {key: value for key, value in settings_of.items() if key != "dtype"}
        optimizer = build_optimizer(model, "adam", lr=0.1, **options)
        if rank == size - 1:
            CHANGES[name](model, optimizer)
        try:
            trained(optimizer, model)
            raised = ""
        except RankMismatchError as error:
            raised = str(error)
        answers.append((raised, optimizer.check()))
    return answers


SETTINGS = {
    "replicated": {},
    "bf16": {"dtype": torch.bfloat16, "bf16": True},
    "distributed": {"sharding": "distributed"},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_each_kind_is_named_on_all_ranks(kind):
    """What changes a step raises before the first; the rest is found by `check()`; own statistics are left alone."""
    # Where a strategy shares state out, each rank has a part of its own.
    names = [name for name in CHANGES if (kind, name) != ("distributed", "state")]
    ranks = launch(changes, 2, names, SETTINGS[kind])
    assert ranks[0] == ranks[1]
    for name, (raised, found) in zip(names, ranks[0], strict=True):
        assert bool(raised) == (name in AT_THE_FIRST_STEP), (name, raised)
        assert AT_THE_FIRST_STEP.get(name, "") in raised
        assert bool(found) == (name in IN_CHECK), (name, found)
        assert IN_CHECK.get(name, "") in "\n".join(found)


def by_hand(
    *,
    lr: float = 0.1,
    width: int = 4,
    clip: float = 1.0,
    value: float = 0.0,
    cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    bf16: bool = False,
    moment: float | None = None,
) -> tuple[nn.Parameter, MegatronOptimizer]:
    """Return a parameter and an optimizer of torch's that is wrapped by hand."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    weight = nn.Parameter(torch.full((width, 2), value, dtype=dtype))
    inner = cls([weight], lr=lr)
    if moment is not None:
        state = {"step": torch.tensor(1.0), "exp_avg": torch.full_like(weight, moment)}
        inner.state[weight] = {**state, "exp_avg_sq": torch.ones_like(weight)}
    config = OptimizerConfig(lr=0.1, clip_grad=clip, bf16=bf16)
    wrapper = MixedPrecisionOptimizer if bf16 else FP32Optimizer
    return weight, wrapper(inner, config)


BY_HAND = {
    "nothing": ({}, ""),
    "lr": ({"lr": 0.2}, "param group {group} lr: 0.1 on rank 0; 0.2 on rank 1"),
    "shape": ({"width": 5}, "{child}parameter 'group0.param0' shape: (4, 2) on rank 0; (5, 2) on rank 1"),
    "clip": ({"clip": 0.5}, "{child}clip_grad: 1.0 (the default) on rank 0; 0.5 on rank 1"),
    "value": ({"value": 1.0}, "parameter '{prefix}group0.param0': norm 0 (digest "),
    "class": ({"cls": torch.optim.NAdam}, "optimizer: AdamW on rank 0; NAdam on rank 1"),
    "moment": ({"moment": 2.0}, "state 'exp_avg' of '{prefix}group0.param0': norm 2.82843 (digest "),
}


def wrapped_by_hand(
    rank: int, size: int, cases: Iterable[Mapping[str, Any]], chained: bool, bf16: bool
) -> list[str]:
    """Return for each case what the first step raises, with one rank that is unlike the other."""
    answers = []
    for case in cases:
        common = {"bf16": bf16, **({"moment": 1.0} if "moment" in case else {})}
        weight, optimizer = by_hand(**{**common, **(case if rank == size - 1 else {})})
        params = [weight]
        if chained:
            other, second = by_hand(bf16=bf16, clip=optimizer.config.clip_grad)
            optimizer, params = ChainedOptimizer([second, optimizer]), [other, weight]
        for param in params:
            param.grad = torch.ones_like(param)
        try:
            optimizer.step()
            answers.append("")
        except RankMismatchError as error:
            answers.append(str(error))
    return answers


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("chained", [False, True], ids=["one", "chain"])
def test_optimizers_that_are_wrapped_by_hand_compare_at_the_first_step(chained, bf16):
    """Classes, settings, shapes, values and state; in a chain those of every child."""
    ranks = launch(wrapped_by_hand, 2, [case for case, _ in BY_HAND.values()], chained, bf16)
    assert ranks[0] == ranks[1]
    where = {"child": "optimizer1: ", "prefix": "optimizer1.", "group": 1}
    if not chained:
        where = {"child": "", "prefix": "", "group": 0}
    for (name, (_, said)), raised in zip(BY_HAND.items(), ranks[0], strict=True):
        assert bool(raised) == bool(said), (name, raised)
        assert said.format(**where) in raised
