"""What somebody writes to the model of one rank between two steps stops all ranks before they drift apart."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from launch import launch
from torch import nn

from megaopt_core import StepResult, build_optimizer
from megaopt_core.errors import RankMismatchError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def stepped(model: nn.Module, optimizer: MegatronOptimizer, staged: bool) -> StepResult | bool:
    """Step with the same gradients on all ranks."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return optimizer.prepare_grads() if staged else optimizer.step()


def written(
    rank: int,
    size: int,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    staged: bool,
    ranks_that_write: Collection[int],
    restored: bool,
) -> tuple[str, bool]:
    """Write to the model of some ranks after a step; return what the next raises, and whether anything moved."""
    torch.manual_seed(0)
    model = nn.Linear(40, 30).to(dtype)
    optimizer = build_optimizer(model, "adam", lr=0.1, **options)
    stepped(model, optimizer, staged=False)
    before = model.weight.detach().clone()
    if rank in ranks_that_write:
        with torch.no_grad():
            model.weight.mul_(2.0)
            if restored:
                model.weight.copy_(before)
    expected = model.weight.detach().clone()
    try:
        stepped(model, optimizer, staged)
    except RankMismatchError as error:
        return str(error), torch.equal(model.weight, expected)
    return "", False


OPTIONS = {
    "bf16": ({"bf16": True}, torch.bfloat16),
    "bf16, no clipping": ({"bf16": True, "clip_grad": 0.0}, torch.bfloat16),
    "bf16, distributed": ({"bf16": True, "sharding": "distributed"}, torch.bfloat16),
    "bf16 remainders": (
        {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True},
        torch.bfloat16,
    ),
}


@pytest.mark.parametrize("staged", [False, True], ids=["step", "prepare_grads"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_all_ranks_raise_where_one_was_written_to(kind, staged):
    """They name the parameter, and nothing has moved."""
    answers = launch(written, 2, *OPTIONS[kind], staged, [1], False)
    assert answers[0][0] == answers[1][0]
    assert "replicas have other values after a write to the model" in answers[0][0]
    assert "parameter 'weight': norm " in answers[0][0]
    assert all(still for _, still in answers)


@pytest.mark.parametrize(("who", "restored"), [([0, 1], False), ([1], True)], ids=["all", "swapped back"])
def test_a_load_on_all_ranks_and_a_swap_on_one_pass(who, restored):
    """Values that are alike again are nobody's fault."""
    answers = launch(written, 2, *OPTIONS["bf16"], False, who, restored)
    assert answers == [("", False)] * 2
