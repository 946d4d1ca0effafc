"""Optimizers of other packages are sharded as finely as a trial allows, and step as they do unsharded."""

import pytest
import torch
from long_runs import sometimes
from models import awkward, batch, loss_of, values_of
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import build_optimizer

pytest.importorskip("megaopt_bridge")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

STEPS = 6


def train(
    rank: int, size: int, optimizer: str, sharding: str
) -> tuple[dict[str, torch.Tensor], dict[str, str], int]:
    """Train under torch's DDP; return values, the strategies in use, and the elements that this rank steps."""
    model = awkward()
    wrapped = TorchDDP(model)
    stepper = build_optimizer(wrapped, optimizer, lr=1e-2, sharding=sharding, clip_grad=0.0)
    for step in range(STEPS):
        loss_of(wrapped, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    strategies = {entry.spec.optimizer: entry.strategy for entry in stepper.routing.params.values()}
    stepped = sum(piece.param.numel() for part in stepper.parts for piece in part.pieces)
    return values_of(model), strategies, stepped


@pytest.mark.parametrize(
    "optimizer", sometimes(["torch:NAdam", "torch:ASGD", "torch:RMSprop"], ["torch:NAdam"])
)
def test_elementwise_classes_are_cut_over_ranks(launch, optimizer) -> None:
    """Each rank steps its share, and the values have the bits of replicated ranks."""
    (expected, _, whole), _ = launch(train, 2, optimizer, None)
    for values, strategies, stepped in launch(train, 2, optimizer, "distributed"):
        assert strategies == {optimizer: "distributed"}
        assert stepped < 0.6 * whole
        assert [name for name, value in values.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.parametrize("optimizer", sometimes(["torch:Adafactor", "torch:Muon"], ["torch:Muon"]))
def test_classes_that_look_at_whole_tensors_have_whole_owners(launch, optimizer) -> None:
    """Layer-wise owners step them; where the class refuses a tensor, Adam steps it, cut."""
    pytest.importorskip("megaopt_layerwise")
    (expected, _, whole), _ = launch(train, 2, optimizer, None)
    ranks = launch(train, 2, optimizer, "layer_wise")
    for values, strategies, stepped in ranks:
        assert strategies[optimizer] == "layer_wise"
        assert stepped < whole
        assert [name for name, value in values.items() if not torch.equal(value, expected[name])] == []
