"""Checkpoints of models on an accelerator."""

from collections.abc import Iterable

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn
from training import logical_state, make, same, values

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator"),
]


def on_gpu(seed: int, dtype: torch.dtype) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model on the accelerator and its optimizer."""
    model, _ = make(seed, dtype=dtype)
    settings = {} if dtype is torch.float32 else {"bf16": True}
    model = model.cuda()
    return model, build_optimizer(model, "adam", lr=1e-2, weight_decay=0.1, clip_grad=0.0, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("background", [False, True])
def test_from_gpu_to_gpu_and_to_cpu(tmp_path, dtype, background):
    """The same bits on the accelerator, and training goes on with them; the CPU loads them too."""
    model, optimizer = on_gpu(0, dtype)
    _train(model, optimizer, range(3))
    pending = save_checkpoint(tmp_path / "last", model, optimizer, async_save=background)
    expected = logical_state(optimizer), values(model)
    _train(model, optimizer, range(3, 6))
    if background:
        pending.result()
    other_model, other = on_gpu(1, dtype)
    load_checkpoint(tmp_path / "last", other_model, other)
    assert same(logical_state(other), expected[0])
    assert same(values(other_model), expected[1])
    _train(other_model, other, range(3, 6))
    assert same(values(other_model), values(model))
    cpu_model, cpu = make(seed=2, dtype=dtype)
    load_checkpoint(tmp_path / "last", cpu_model, cpu)
    assert same(logical_state(cpu), expected[0])


def _train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> None:
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=chance).to(param.device, param.dtype)
        optimizer.step()
