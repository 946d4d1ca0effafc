"""Optimizers for these tests, brought by a plugin of their own: the core is tested with no plugin installed."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megaopt_testing.plugins import temporary_plugin
from torch import nn

from megaopt_core import OptimizerEntry, build_optimizer, hookimpl
from megaopt_core.optimizers import MegatronOptimizer

LOW = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8}
)
MOMENTS = {"exp_avg": LOW, "exp_avg_sq": LOW}


def _kwargs(**more: Any) -> Callable[..., dict[str, Any]]:
    def kwargs(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
        return {"lr": config.lr, "weight_decay": config.weight_decay, **more}

    return kwargs


class TorchOptimizers:
    """torch's own optimizers under names of these tests."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        adamw, sgd = torch.optim.AdamW, torch.optim.SGD
        return {
            "t_adam": OptimizerEntry(
                adamw, config_to_kwargs=_kwargs(foreach=False), supports_fp16=True, state_dtypes=MOMENTS
            ),
            "t_fused": OptimizerEntry(
                adamw,
                config_to_kwargs=_kwargs(fused=True),
                supports_fp16=True,
                state_dtypes=MOMENTS,
                honours_noop=True,
            ),
            "t_fused_momentum": OptimizerEntry(
                sgd, config_to_kwargs=_kwargs(fused=True, momentum=0.9), supports_fp16=True, honours_noop=True
            ),
            "t_sgd": OptimizerEntry(sgd, config_to_kwargs=_kwargs(), supports_fp16=True),
            "t_momentum": OptimizerEntry(sgd, config_to_kwargs=_kwargs(momentum=0.9), supports_fp16=True),
        }


@pytest.fixture(autouse=True)
def torch_optimizers() -> Iterator[None]:
    """Register the optimizers of this file for every test here."""
    with temporary_plugin(TorchOptimizers(), "torch-optimizers"):
        yield


@pytest.fixture
def build() -> Callable[..., MegatronOptimizer]:
    """Build a named optimizer with no overrides, no weight decay and no clipping unless a test asks for them."""

    def make(model, optimizer="t_adam", *, overrides=None, **settings):
        settings = {"lr": 0.01, "weight_decay": 0.0, "clip_grad": 0.0, **settings}
        return build_optimizer(model, optimizer, overrides=overrides or {}, **settings)

    return make


@pytest.fixture
def mlp() -> Callable[..., nn.Module]:
    """Make a small network whose weights depend on the seed alone."""

    def make(dtype=torch.float32, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        return model.to(dtype)

    return make


@pytest.fixture
def give() -> Callable[..., None]:
    """Give every parameter a random gradient that depends on the step alone."""

    def grads(model, step=0, scale=1.0):
        generator = torch.Generator().manual_seed(100 + step)
        for param in model.parameters():
            param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)

    return grads


@pytest.fixture
def snapshot() -> Callable[..., SimpleNamespace]:
    """Copy everything that a step may change, as bytes that compare exactly."""

    def bits(value):
        if isinstance(value, torch.Tensor):
            return (
                value.detach().contiguous().clone().view(torch.uint8).tolist()
                if value.dim()
                else value.item()
            )
        return value

    def take(model, optimizer):
        return SimpleNamespace(
            params=[bits(param) for param in model.parameters()],
            state={
                optimizer.names[param]: {key: bits(value) for key, value in state.items()}
                for param, state in optimizer.state.items()
            },
            groups=[
                {key: bits(value) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
        )

    return take
