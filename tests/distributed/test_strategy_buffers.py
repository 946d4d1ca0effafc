"""A strategy says where parameters lie in the buffers of a wrapped model, and how ranks share them out."""

import pytest
import torch
from attrs import evolve, frozen
from long_runs import sometimes
from megaopt_testing import temporary_plugin
from torch import nn

from megaopt_core import OptimizerConfig, get_megatron_optimizer, get_registry, hookimpl, route
from megaopt_core.errors import MegaoptError, ShardingError
from megaopt_core.sharding import FullParamLayout

distributed = pytest.importorskip("megaopt_distributed")
pytestmark = [
    pytest.mark.any_python,
    pytest.mark.distributed,
    pytest.mark.skipif("adam" not in get_registry().optimizers(), reason="needs an optimizer to step"),
]


def strategy() -> object:
    """Return the distributed optimizer with a first rank that owns an eighth of every bucket."""
    base = type(get_registry().strategy("distributed"))

    @frozen
    class Lopsided(base):
        name: str = "lopsided"

        def buffers(self, specs, world, options):
            """Return the usual buffers, shared out otherwise."""
            ranks, buffers = world.size("dp"), {}
            for key, buffer in super().buffers(specs, world, options).buffers.items():
                ends = []
                for low, high in buffer.buckets:
                    first = low + (high - low) // 64 * 8
                    rest = [
                        first + (high - first) // (8 * (ranks - 1)) * 8 * rank for rank in range(1, ranks - 1)
                    ]
                    ends.append((first, *rest, high))
                buffers[key] = evolve(buffer, share_ends=tuple(ends))
            return FullParamLayout(buffers)

    class Plugin:
        megaopt_api = "1"

        @hookimpl
        def megaopt_sharding_strategies(self):
            return {"lopsided": Lopsided()}

    return Plugin()


def train(rank: int, size: int, sharding: str) -> tuple[list[torch.Tensor], int]:
    """Train in the buffers that the strategy asks for; return the parameters and the elements that are stepped here."""
    with temporary_plugin(strategy(), name="lopsided"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 8))
        config = OptimizerConfig(optimizer="adam", lr=1e-2, sharding=sharding)
        ddp_config = distributed.DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=600
        )
        layout = distributed.plan_full_param_layout(module, ddp_config, routing=route(config, module))
        model = distributed.DistributedDataParallel(module, ddp_config, full_param_layout=layout)
        optimizer = get_megatron_optimizer(config, model)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=generator)).square().mean().backward()
            optimizer.step()
        held = sum(
            shard.numel
            for part in optimizer.parts
            for piece in part.pieces
            for _, shard in piece.spec.members
        )
        return [param.detach().clone() for param in module.parameters()], held


@pytest.mark.parametrize("size", sometimes([2, 3], [3]))
def test_shares_as_a_strategy_gives_them_train_as_equal_ones(launch, size):
    """Gradients are scattered and parameters gathered by them, and the first rank steps an eighth."""
    usual, lopsided = launch(train, size, "distributed"), launch(train, size, "lopsided")
    numel = sum(param.numel() for param in usual[0][0])
    assert sum(held for _, held in lopsided) == sum(held for _, held in usual) == numel
    assert lopsided[0][1] < numel / 6 < min(held for _, held in lopsided[1:])
    for (values, _), (others, _) in zip(usual, lopsided, strict=True):
        for value, other in zip(values, others, strict=True):
            assert (value - other).norm() <= 1e-6 * value.norm()


def refused_on_one(rank: int, size: int) -> str | None:
    """Build with a strategy that has no layout for the second rank; return what each rank is told."""
    base = type(get_registry().strategy("distributed"))

    @frozen
    class Picky(base):
        name: str = "picky"

        def layout(self, specs, world, options):
            """Refuse on one rank."""
            if rank == 1:
                raise ShardingError("nothing for this rank")
            return super().layout(specs, world, options)

    class Plugin:
        megaopt_api = "1"

        @hookimpl
        def megaopt_sharding_strategies(self):
            return {"picky": Picky()}

    with temporary_plugin(Plugin(), name="picky"):
        module = nn.Linear(8, 8)
        try:
            get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.1, sharding="picky"), module)
        except MegaoptError as error:
            return str(error)
    return None


def test_an_error_of_one_ranks_layout_is_raised_on_all(launch):
    """Nobody waits for a rank that has given up."""
    first, second = launch(refused_on_one, 2)
    assert second == "nothing for this rank"
    assert "rank 1" in first
    assert "nothing for this rank" in first
