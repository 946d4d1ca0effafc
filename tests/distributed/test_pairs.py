"""An optimizer and a strategy that users install as a pair: two ranks train, save and resume with these alone.

Each pair has an environment of tox, which holds what the metadata of the two ask for and nothing else.
"""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import build_optimizer
from megaopt_core.errors import PluginNotInstalledError
from megaopt_core.registry import get_registry

PAIRS = {
    "adam-distributed": ("adam", "distributed"),
    "muon-layerwise": ("muon", "layer_wise"),
    "soap-distributed": ("soap", "replicated"),  # it steps whole tensors, which layer-wise owners share out
}
HERE = re.sub(r"^py\d+-", "", os.environ.get("MEGAOPT_COMBO", ""))
STEPS = 3

pytestmark = pytest.mark.skipif(
    HERE not in {"", *PAIRS}, reason="each pair has an environment of tox, where nothing else is installed"
)


def made(name: str, sharding: str, ranks: int) -> tuple[nn.Module, Any]:
    """Return a model, and what steps it; several ranks average their gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    model = DistributedDataParallel(model) if ranks > 1 else model
    return model, build_optimizer(model, name, lr=1e-2, sharding=sharding)


def train(model: nn.Module, optimizer: Any, batches: Iterable[torch.Tensor]) -> None:
    """Step once for each batch."""
    for batch in batches:
        optimizer.zero_grad()
        (model(batch) - batch.flip(1)).square().mean().backward()
        optimizer.step()


def batches_of(ranks: int, rank: int | None = None) -> torch.Tensor:
    """Return the batches of one rank, or of all of them together."""
    every = torch.randn(2 * STEPS, 4 * ranks, 8, generator=torch.Generator().manual_seed(1))
    return every if rank is None else every[:, 4 * rank : 4 * (rank + 1)]


def train_save_and_resume(rank: int, size: int, name: str, sharding: str, folder: str) -> list[list[Any]]:
    """Return the parameters after all steps: of a run, and of another that resumed it halfway."""
    from megaopt_checkpoint import load_checkpoint, save_checkpoint

    first, second = batches_of(size, rank).split(STEPS)
    model, optimizer = made(name, sharding, size)
    train(model, optimizer, first)
    save_checkpoint(f"{folder}/run", model=model, optimizer=optimizer)
    other, again = made(name, sharding, size)
    load_checkpoint(f"{folder}/run", model=other, optimizer=again)
    for run in ((model, optimizer), (other, again)):
        train(*run, second)
    return [[param.detach().tolist() for param in each.parameters()] for each in (model, other)]


@pytest.mark.distributed
@pytest.mark.parametrize("pair", PAIRS)
def test_two_ranks_train_save_and_resume_with_a_pair_alone(
    pair: str, launch: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """A resumed run takes the same steps, to the bit; one process on all of the batch takes them to rounding."""
    name, sharding = PAIRS[pair]
    registry = get_registry()
    if HERE not in {"", pair} or name not in registry.optimizers() or sharding not in registry.strategies():
        pytest.skip(f"{pair} is not what is installed here")
    ((one, resumed), (other, _)) = launch(train_save_and_resume, 2, name, sharding, str(tmp_path))
    assert resumed == one == other
    if name == "soap":
        return  # the rounding of an average turns its basis, which moves whole entries
    model, optimizer = made(name, "replicated", 1)
    train(model, optimizer, batches_of(2))
    for param, stepped in zip(model.parameters(), one, strict=True):
        torch.testing.assert_close(torch.tensor(stepped), param.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(HERE != "soap-distributed", reason="layer-wise sharding is installed")
def test_soap_under_the_distributed_strategy_names_what_shares_out_whole_tensors() -> None:
    """Neither of the pair cuts a matrix that SOAP has to see whole."""
    with pytest.raises(PluginNotInstalledError, match="pip install megaopt-layerwise"):
        made("soap", "distributed", 1)
