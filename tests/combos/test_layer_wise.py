"""Every installed optimizer takes the same steps where matrices have owners."""

import pytest
import torch
from torch import nn

from megaopt_core import Granularity, build_optimizer, get_registry
from megaopt_core.optimizers import MegatronOptimizer

pytest.importorskip("megaopt_layerwise")

NAMES = [
    name
    for name, entry in sorted(get_registry().optimizers().items())
    if entry.granularity in (Granularity.TENSOR, Granularity.ELEMENT)
]


def build(name: str, sharding: str) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 8))
    return model, build_optimizer(model, name, lr=1e-3, sharding=sharding)


def trained(name: str, sharding: str) -> list[torch.Tensor]:
    """Return parameters after three steps."""
    model, optimizer = build(name, sharding)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_one_process_makes_the_bits_of_a_replicated_optimizer(name: str) -> None:
    """In memory where the matrices of one owner lie together."""
    whole, owned = trained(name, "replicated"), trained(name, "layer_wise")
    assert all(torch.equal(left, right) for left, right in zip(whole, owned, strict=True))


def test_a_model_that_leaves_its_memory_is_stepped_in_it_again() -> None:
    """Trainers move models by `param.data`: values come back into the strategy's memory, and the step reaches them."""
    name = next(name for name in NAMES if get_registry().optimizer(name).granularity is Granularity.TENSOR)
    stepped = []
    for moves in (False, True):
        model, optimizer = build(name, "layer_wise")
        for param in model.parameters():
            param.data = param.data.clone() if moves else param.data
            param.grad = torch.ones_like(param)
        optimizer.step()
        stepped.append([param.detach().clone() for param in model.parameters()])
    assert all(torch.equal(left, right) for left, right in zip(*stepped, strict=True))
