"""A third party's strategy for FSDP2 trains like a replicated optimizer and shares checkpoints with `distributed`."""

import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import torch
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.registry import PluginRegistry, reset_registry

DISTRIBUTED = Path(__file__).parents[2] / "distributed"
SETTINGS = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.5}


def use_plugin() -> None:
    """Install the strategy into this process's registry, as an entry point would."""
    sys.path.insert(0, str(Path(__file__).parent))
    point = EntryPoint("fsdp2", "fsdp2_plugin", "megaopt")
    reset_registry(PluginRegistry([*entry_points(group="megaopt"), point]))


def bare() -> nn.Sequential:
    """Return the same model on every rank; 13 rows do not divide by two, and one layer has a single row."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 6), nn.LayerNorm(6), nn.Linear(6, 1))


def train(
    model: nn.Module, optimizer: MegatronOptimizer, rank: int, steps: Iterable[int]
) -> list[float | None]:
    """Train for some steps, each rank on inputs of its own, and return the norms."""
    norms = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        norms.append(optimizer.step().grad_norm)
        optimizer.zero_grad()
    return norms


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, whole."""
    module = getattr(model, "module", model)
    return {
        name: (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()
        for name, param in module.named_parameters()
    }


def build(kind: str) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer: replicated, distributed or FSDP2."""
    model = bare()
    if kind == "fsdp2":
        fully_shard(model)
        return model, build_optimizer(model, "adam", sharding="fsdp2", **SETTINGS)
    return (wrapped := TorchDDP(model)), build_optimizer(wrapped, "adam", sharding=kind, **SETTINGS)


def compare(
    rank: int, size: int, folder: str
) -> dict[str, tuple[dict[str, torch.Tensor], list[float | None]]]:
    """Train all three kinds; then continue each sharded one from the other's checkpoint."""
    use_plugin()
    results = {}
    for kind in ("replicated", "distributed", "fsdp2"):
        model, optimizer = build(kind)
        norms = train(model, optimizer, rank, range(3))
        save_checkpoint(f"{folder}/{kind}", getattr(model, "module", model), optimizer)
        norms += train(model, optimizer, rank, range(3, 6))
        results[kind] = values_of(model), norms
    for source, kind in (("distributed", "fsdp2"), ("fsdp2", "distributed"), ("fsdp2", "fsdp2")):
        model, optimizer = build(kind)
        load_checkpoint(f"{folder}/{source}", getattr(model, "module", model), optimizer)
        norms = train(model, optimizer, rank, range(3, 6))
        results[f"{source} to {kind}"] = values_of(model), norms
    return results


@pytest.mark.distributed
def test_fsdp2_trains_like_the_others_and_shares_checkpoints(tmp_path, monkeypatch):
    """Parameters and norms are equal to rounding, also after each has gone on from the other's checkpoint."""
    pytest.importorskip("megaopt_distributed")
    monkeypatch.syspath_prepend(DISTRIBUTED)
    from launch import launch

    for results in launch(compare, 2, str(tmp_path)):
        expected, norms = results["replicated"]
        for run, (values, its_norms) in results.items():
            assert its_norms == pytest.approx(norms[-len(its_norms) :], rel=1e-5), run
            for name, value in expected.items():
                torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, msg=f"{run}: {name}")
