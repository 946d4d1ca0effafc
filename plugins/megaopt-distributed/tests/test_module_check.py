"""What changes about a wrapped module and would no longer fit its buffers is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megaopt_core.errors import UnsupportedOperationError

SHARDED = {"use_distributed_optimizer": True}


def wrapped(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    """Return a wrapped model."""
    return DistributedDataParallel(module, DistributedDataParallelConfig(**settings))


def layers() -> nn.Sequential:
    """Return two layers, of which the first does not train."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(requires_grad=False)
    return model


def step(model: DistributedDataParallel) -> None:
    """Run what comes before every step of an optimizer."""
    dtype = next(model.parameters()).dtype
    model(torch.ones(4, 3, dtype=dtype)).sum().backward()
    model.finish_grad_sync()
    model.zero_grad_buffer()


def unfreeze(model: nn.Module) -> None:
    """Let a layer train that did not."""
    model[0].requires_grad_()


def add(model: nn.Module) -> None:
    """Add a layer."""
    model.append(nn.Linear(2, 2))


def replace(model: nn.Module) -> None:
    """Put a new layer in the place of one."""
    model[1] = nn.Linear(5, 2)


@pytest.mark.parametrize("settings", [{}, SHARDED])
@pytest.mark.parametrize(
    ("change", "name"), [(unfreeze, "0.weight"), (add, "2.weight"), (replace, "1.weight")]
)
def test_what_trains_without_a_place_is_named(
    settings: dict, change: Callable[[nn.Module], None], name: str
) -> None:
    """Its gradient would stay on its rank: the next reduction refuses, before anything is stepped."""
    model = wrapped(layers(), **settings)
    step(model)
    change(model.module)
    with pytest.raises(UnsupportedOperationError, match=rf"'{name}' trains, but .* has no place"):
        step(model)


def test_a_twin_that_trains_beside_a_frozen_parameter_is_named() -> None:
    """They share memory, but the one that was seen first does not train."""
    model = layers()
    model.append(nn.Linear(2, 5))
    model[2].weight = nn.Parameter(model[0].weight.data.view(5, 3))
    ddp = wrapped(model)
    with pytest.raises(UnsupportedOperationError, match=r"'0\.weight' trains"):
        ddp.finish_grad_sync()


def test_freezing_is_allowed() -> None:
    """A frozen parameter has a zero gradient."""
    model = wrapped(layers())
    model.module[1].bias.requires_grad_(requires_grad=False)
    step(model)


CONVERSIONS = {
    "bf16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "meta": lambda model: model.to("meta"),
    "empty": lambda model: model.to_empty(device="cpu"),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_conversions_that_would_take_parameters_out_of_buffers_are_refused(kind: str) -> None:
    """Through the wrapper at once, and nothing has changed."""
    model = wrapped(nn.Linear(3, 2), **SHARDED)
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    with pytest.raises(
        UnsupportedOperationError, match=r"takes '\w+' out of the buffers .* before it is wrapped"
    ):
        CONVERSIONS[kind](model)
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == before
    step(model)


@pytest.mark.parametrize("settings", [{}, SHARDED])
def test_conversions_that_change_nothing_pass(settings: dict) -> None:
    """Trainers call `.to(device)` on whatever they get."""
    model = wrapped(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), **settings)
    assert model.to("cpu").float().to(torch.float32).cpu() is model
    step(model)


@pytest.mark.parametrize("settings", [{}, SHARDED])
def test_a_conversion_of_the_bare_module_is_found_before_the_step(settings: dict) -> None:
    """It goes past the wrapper."""
    model = wrapped(nn.Linear(3, 2), **settings)
    model.module.to(torch.float64)
    with pytest.raises(UnsupportedOperationError, match="takes 'weight' out of the buffers"):
        step(model)
    model = wrapped(nn.Linear(3, 2), **SHARDED)
    model.module.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, assign=True)
    with pytest.raises(UnsupportedOperationError, match="'weight' trains"):
        model.finish_grad_sync()
