"""State belongs to the optimizer that made it: of the same name, and of the same distribution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_testing.fake_plugins import FakePlugins
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CheckpointMismatchError, RoutingError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.plugin_api import StoredParam, StoredRouting

CODE = """
@hookimpl
def megaopt_optimizer_entries():
    made_of = {"config_to_kwargs": lambda *_: {"lr": 0.1, "momentum": 0.9}, "state": {"momentum_buffer": "param"}}
    return {"momentum": OptimizerEntry(torch.optim.SGD, **made_of)}
"""


def _stepped() -> tuple[nn.Module, MegatronOptimizer]:
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, "momentum", lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return model, optimizer


def test_state_of_another_distributions_optimizer_is_refused(plugins: FakePlugins) -> None:
    """Nobody knows whether it means the same; `strict=False` lets it start anew."""
    plugins.install("theirs", CODE, dist="their-optimizers")
    plugins.install("ours", CODE, dist="our-optimizers")
    plugins.registry(MEGAOPT_PLUGINS="theirs")
    model, optimizer = _stepped()
    saved, described = optimizer.state_dict(), optimizer.checkpoint_state().state_dict()
    optimizer.load_state_dict(saved)
    routing = StoredRouting(
        "last week",
        {name: StoredParam("momentum") for name, _ in model.named_parameters()},
        plugins={"momentum": "their-optimizers"},
    )
    build_optimizer(model, "momentum", lr=0.1, routing=routing)
    plugins.registry(MEGAOPT_PLUGINS="ours")
    model, other = _stepped()
    ways: list[Callable[[], Any]] = [
        lambda: other.load_state_dict(saved),
        lambda: other.checkpoint_state().load_state_dict(described),
    ]
    for way in ways:
        with pytest.raises(
            CheckpointMismatchError,
            match="'weight': it was stepped by 'momentum' of their-optimizers, here by that of our-optimizers",
        ):
            way()
    with pytest.raises(
        RoutingError, match="the optimizer 'momentum' of 'weight' came from their-optimizers, but here it"
    ):
        build_optimizer(model, "momentum", lr=0.1, routing=routing)
