"""A graph from before a step refuses to go back over weights that the step has changed, as under torch's optimizers."""

import warnings

import pytest
import torch
from torch import nn

from megaopt_core import build_optimizer, get_registry

pytestmark = pytest.mark.any_python

REGISTRY = get_registry()
STRATEGIES = {"replicated", "distributed", "layer_wise"} & set(REGISTRY.strategies())
PRECISIONS = {
    "fp32": (torch.float32, {}),
    "main copies": (torch.bfloat16, {"bf16": True}),
    "remainders": (
        torch.bfloat16,
        {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True},
    ),
}
STALE = "modified by an inplace operation"


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def _can_shard(strategy: str, optimizer: str) -> bool:
    """Whether a strategy, or its fallback where that is installed, shards what an optimizer steps."""
    names = {strategy, REGISTRY.strategy(strategy).fallback} & set(REGISTRY.strategies())
    granularity = REGISTRY.optimizer(optimizer).granularity
    return any(granularity in REGISTRY.strategy(name).granularities for name in names)


SHARDED = [
    (optimizer, strategy)
    for optimizer in sorted(REGISTRY.optimizers())
    for strategy in sorted(STRATEGIES)
    if _can_shard(strategy, optimizer)
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("optimizer", "strategy"), SHARDED)
def test_a_graph_that_is_kept_over_a_step_is_refused(optimizer, strategy, precision) -> None:
    """Fused kernels and flat memory count no writes by themselves."""
    dtype, settings = PRECISIONS[precision]
    model = _model(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = build_optimizer(model, optimizer, lr=0.01, sharding=strategy, **settings)
    loss = model(torch.ones(3, 4, dtype=dtype)).square().sum()
    loss.backward(retain_graph=True)
    built.step()
    with pytest.raises(RuntimeError, match=STALE):
        loss.backward()


@pytest.mark.parametrize("optimizer", sorted(REGISTRY.optimizers()))
def test_what_had_no_gradient_may_still_be_gone_back_over(optimizer) -> None:
    """Two losses of two models that one optimizer steps in turns: the other's weights are as they were."""
    models = nn.ModuleList([_model(torch.float32), _model(torch.float32)])
    for model in models:
        model[-1].weight.use_muon = False
    built = build_optimizer(models, optimizer, lr=0.01)
    first, second = (model(torch.ones(3, 4)).square().sum() for model in models)
    first.backward()
    built.step()
    before = [param.detach().clone() for param in models[1].parameters()]
    second.backward()
    assert all(map(torch.equal, before, models[1].parameters()))
    assert all(param.grad is not None for param in models[1].parameters())
