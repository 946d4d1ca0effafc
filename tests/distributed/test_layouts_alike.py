"""Ranks whose layouts differ say so at the build, before anything is sent by them."""

from collections.abc import Sequence

import pytest
import torch
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import build_optimizer, get_registry, hookimpl
from megaopt_core.errors import MegaoptError
from megaopt_core.params import RankCoordinates
from megaopt_core.sharding import PieceSpec, World

layerwise = pytest.importorskip("megaopt_layerwise")
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.distributed,
    pytest.mark.skipif(
        "muon" not in get_registry().optimizers(), reason="needs an optimizer of whole tensors"
    ),
]


def strategy(base: str, how: str, rank: int) -> object:
    """Return a strategy whose layout depends on the rank that makes it."""
    kind = type(get_registry().strategy(base))

    class Plugin:
        megaopt_api = "1"

        @hookimpl
        def megaopt_sharding_strategies(self):
            class Mine(kind):
                def layout(self, specs, world, options):
                    """Deal other ranks' parameters to other ranks, as one that goes by `hash()` would."""
                    made = super().layout(specs, world, options)
                    if how == "same" or not rank:
                        return made
                    return Turned(made, world)

            return {"mine": Mine(name="mine")}

    return Plugin()


class Turned:
    """What the rank at the mirrored place would step."""

    def __init__(self, made: object, world: World) -> None:
        self.made, self.size = made, world.size("dp")

    def __getattr__(self, name: str) -> object:
        return getattr(self.made, name)

    def pieces(self, rank: RankCoordinates) -> Sequence[PieceSpec]:
        """Return the pieces of another rank."""
        return self.made.pieces({**rank, "dp": self.size - 1 - rank.get("dp", 0)})


def build(rank: int, size: int, base: str, optimizer: str, how: str) -> str | None:
    """Build, step, and return what is raised."""
    with temporary_plugin(strategy(base, how, rank), name="mine"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Linear(32, 40), nn.Linear(40, 8))
        try:
            made = build_optimizer(model, optimizer, lr=0.1, sharding="mine")
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            made.step()
        except MegaoptError as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(("base", "optimizer"), [("distributed", "adam"), ("layer_wise", "muon")])
@pytest.mark.parametrize("size", [2, 4])
def test_a_layout_that_differs_between_ranks_raises_on_all(launch, base, optimizer, size) -> None:
    """The error names a parameter, who steps it by whose layout, and the strategy."""
    said = launch(build, size, base, optimizer, "turned", timeout=120.0, group_timeout=30.0)
    assert len(set(said)) == 1
    assert said[0] is not None
    assert said[0].startswith("RankMismatchError: laying out the optimizer: ranks differ")
    assert ".weight': dp=" in said[0]
    assert "on rank 0;" in said[0]
    assert launch(build, size, base, optimizer, "same", timeout=120.0) == [None] * size
