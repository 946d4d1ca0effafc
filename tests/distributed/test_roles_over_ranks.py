"""Ranks agree on roles: a forward that raises on one of them alone makes all do without."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megaopt_core import OptimizerConfig, build_optimizer, route
from megaopt_core.errors import DoubtfulRolesWarning

pytest.importorskip("megaopt_muon")
pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


class Block(nn.Module):
    """A fused projection, whose parts only a forward shows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(gate.relu() * up)


class Model(nn.Module):
    """Two blocks between an embedding and a head; its forward raises on the ranks that are named."""

    def __init__(self, failing: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.failing = failing
        self.tokens, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() in self.failing:
            raise RuntimeError("no such kernel on this rank")
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.zeros(2, 4, dtype=torch.long)


def routed_alike(rank: int, size: int, failing: tuple[int, ...], cut: bool) -> None:
    """Route a model, and build its optimizer."""
    model = Model(failing)
    if cut:
        mesh = init_device_mesh("cpu", (size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    routing = route(OptimizerConfig(optimizer="muon", lr=1e-3), model, example=IDS)
    decision = routing.params["blocks.0.gate_up.weight"].decision
    views: list[object] = [None] * size
    dist.all_gather_object(views, (decision.view, decision.doubt, bool(decision.no_forward)))
    assert len(set(views)) == 1
    if not failing:
        assert decision.view is not None
        assert (decision.view.split_sizes, decision.uncertain) == ((16, 16), False)
        return
    assert (str(decision.doubt), decision.view.split_sizes) == ("layout", ())
    assert "no such kernel on this rank" in decision.no_forward
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build_optimizer(model, "muon", lr=1e-3, example=IDS)
    (warning,) = [one for one in caught if one.category is DoubtfulRolesWarning]
    assert "no such kernel on this rank" in str(warning.message)


@pytest.mark.parametrize("cut", [False, True], ids=["replicas", "fsdp2"])
@pytest.mark.parametrize("failing", [(), (1,), (0, 1)], ids=["none", "one", "all"])
def test_all_ranks_get_the_same_routing(launch, failing, cut) -> None:
    """No rank waits for another; the reason of the one that failed is told on all."""
    launch(routed_alike, 2, failing, cut)
