"""Muon and what its metadata ask for, alone: it trains and resumes, and errors name what brings the rest."""

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import megaopt_core
from megaopt_core import FP32Optimizer, OptimizerConfig, build_optimizer
from megaopt_core.errors import MegaoptError

HERE = re.sub(r"^py\d+-", "", os.environ.get("MEGAOPT_COMBO", ""))

pytestmark = pytest.mark.skipif(HERE != "muon-only", reason="the other distributions are installed")


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model that has matrices and others, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16)).to(dtype)
    example = torch.zeros(1, 1, dtype=torch.long)
    return model, build_optimizer(model, **{"optimizer": "muon", "lr": 1e-2, "example": example, **settings})


def wrapped() -> Any:
    """Wrap a class that no entry describes."""
    return FP32Optimizer(torch.optim.NAdam(nn.Linear(2, 2).parameters()), OptimizerConfig())


def checkpoint_state() -> Any:
    """Ask for what torch's distributed checkpoints store."""
    _, optimizer = made()
    return optimizer.checkpoint_state()


def train(model: nn.Module, optimizer: Any, seeds: Iterable[int]) -> None:
    """Step once for each seed, with a batch of its own."""
    for seed in seeds:
        tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def test_a_state_dict_resumes_a_run_in_mixed_precision() -> None:
    """Main parameters and both optimizers' states come back; files and kits are not needed for it."""
    model, optimizer = made(torch.bfloat16, bf16=True)
    train(model, optimizer, range(3))
    other, again = made(torch.bfloat16, bf16=True)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(optimizer.state_dict())
    for run in ((model, optimizer), (other, again)):
        train(*run, range(3, 6))
    assert {row.optimizer for row in optimizer.report().params} == {"muon", "adam"}
    for one, resumed in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, resumed)


@pytest.mark.parametrize(
    ("ask", "distribution"),
    [
        (lambda: made(optimizer="soap"), "megaopt-soap"),
        (lambda: made(optimizer="lion"), "megaopt-lion"),
        (lambda: made(sharding="distributed"), "megaopt-distributed"),
        (lambda: made(sharding="layer_wise"), "megaopt-layerwise"),
        (lambda: made(sharding="fsdp"), "megaopt-fsdp"),
        (lambda: made(optimizer_cpu_offload=True, optimizer_offload_fraction=1.0), "megaopt-device"),
        (lambda: made(torch.bfloat16, bf16=True, use_precision_aware_optimizer=True), "megaopt-lowbit"),
        (wrapped, "megaopt-bridge"),
        (checkpoint_state, "megaopt-checkpoint"),
        (lambda: megaopt_core.save_checkpoint, "megaopt-checkpoint"),
    ],
)
def test_the_error_of_what_is_missing_is_one_sentence_with_its_line(
    ask: Callable[[], Any], distribution: str
) -> None:
    """Nobody has to know which distribution brings what."""
    with pytest.raises(MegaoptError, match=f"pip install {distribution}") as told:
        ask()
    assert len(str(told.value).splitlines()) == 1
