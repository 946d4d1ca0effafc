"""Without megaopt-guards ranks step as with it; the report says that nobody compares them."""

import math
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.registry import reset_registry

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def stepped(rank: int, size: int, blocked: str) -> tuple[str, list[bool], list[Any]]:
    """The report, whether each of three steps was taken, and the values after them."""
    os.environ["MEGAOPT_DISABLE_PLUGINS"] = blocked
    reset_registry()
    torch.manual_seed(0)
    model = nn.Linear(4, 4).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = build_optimizer(model, "adam", lr=0.1, bf16=True)
    taken = []
    for step in range(3):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.5)
        if step == 1 and rank == 1:
            model.weight.grad[0, 0] = math.inf
        taken.append(optimizer.step().update_successful)
    return str(optimizer.report()), taken, [param.detach() for param in model.parameters()]


def test_steps_are_the_same_and_the_report_says_it(launch) -> None:
    """Found-inf of one rank skips the step on both; values are equal to the bit."""
    with_guards, without = launch(stepped, 2, ""), launch(stepped, 2, "guards")
    for (guarded, taken, values), (alone, others, same) in zip(with_guards, without, strict=True):
        assert taken == others == [True, False, True]
        assert all(map(torch.equal, values, same))
        assert "ranks: 2 replicas are compared before every step" in guarded
        assert "ranks: values of ranks are not compared" in alone
        assert "pip install megaopt-guards" in " ".join(alone.split())
