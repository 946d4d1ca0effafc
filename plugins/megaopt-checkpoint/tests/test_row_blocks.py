"""Pieces that are row blocks with memory of their own take their own rows of what is loaded."""

from typing import Any

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from row_blocks import row_blocks
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import StateDictError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = pytest.mark.any_python

WEIGHT = torch.arange(8.0).view(4, 2)


def make(
    values: torch.Tensor,
    optimizer: str = "sgd",
    sharding: str = "replicated",
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[nn.Linear, MegatronOptimizer]:
    """Return a model of one 4x2 weight, and its optimizer."""
    model = torch.nn.Linear(2, 4, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(values)
    settings = {"lr": 0.0, "clip_grad": 0.0, **settings}
    return model, build_optimizer(model, optimizer, sharding=sharding, **settings)


def step(model: nn.Module, optimizer: MegatronOptimizer) -> None:
    """Step with a gradient of ones."""
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_load_fills_the_rows_of_the_box(tmp_path, rank, dtype):
    """A step with a learning rate of zero after a load leaves the loaded values."""
    settings = {} if dtype is torch.float32 else {"bf16": True}
    save_checkpoint(tmp_path / "last", *make(WEIGHT, dtype=dtype, **settings))
    with row_blocks(2, rank):
        model, optimizer = make(-torch.ones(4, 2), sharding="blocks", dtype=dtype, **settings)
        load_checkpoint(tmp_path / "last", model, optimizer)
        step(model, optimizer)
    assert torch.equal(model.weight.detach().float(), WEIGHT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_state_dict_fills_the_rows_of_the_box(rank):
    """Main parameters start from the model's own rows, where a state dict has none."""
    with row_blocks(2, rank):
        model, optimizer = make(WEIGHT, sharding="blocks", dtype=torch.bfloat16, bf16=True)
        plain = {
            "state": {},
            "param_groups": [{"params": [0], "param_names": ["weight"], "lr": 0.0}],
        }
        plain["state"][0] = {"momentum_buffer": None}
        optimizer.load_state_dict(plain)
        step(model, optimizer)
    assert torch.equal(model.weight.detach().float(), WEIGHT)


def test_a_state_dict_of_other_rows_is_refused():
    """What another rank steps is not taken for this one's, and nothing has changed."""
    with row_blocks(2, 0):
        model, optimizer = make(WEIGHT, optimizer="adam", sharding="blocks")
        step(model, optimizer)
        state = optimizer.state_dict()
    with row_blocks(2, 1):
        other_model, other = make(WEIGHT, optimizer="adam", sharding="blocks")
        with pytest.raises(
            StateDictError, match=r"this rank holds no box of \[2, 2\] at \[2, 0\], but SlicedTensor"
        ):
            other.load_state_dict(state)
        assert not other.state[other_model.weight]["exp_avg"].any()
