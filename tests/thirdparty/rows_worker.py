"""What every rank of the tests of megaopt-rows does."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from torch import nn

from megaopt_core import ParamKey, ProcessGroupCollection, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.registry import reset_registry

SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "clip_grad": 0.0}
OPTIMIZERS = {
    "adam": ("adam", {}),
    "muon": ("muon", {"muon_nesterov": True}),
    "adamuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "adamuon"}),
    "normuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "normuon"}),
}
PRECISIONS = {
    "fp32": (torch.float32, {}),
    "main": (torch.bfloat16, {"bf16": True}),
    "remainders": (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
}

CASES = {
    "muon in fp32": ("muon", "fp32"),
    "adamuon with main params": ("adamuon", "main"),
    "normuon with remainders": ("normuon", "remainders"),
}
"""Optimizers and precisions that checkpoints are tried with."""

CUT_OVER_TP = ("square", "wide")
"""What tensor parallelism cuts, row by row."""


def use(installed: str) -> None:
    """Find the plugin where it is installed."""
    sys.path.insert(0, installed)
    reset_registry()


class Model(nn.Module):
    """Matrices whose rows no number of ranks divides, one of three rows, a number, and what Adam steps."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)

        def weight(*shape):
            return nn.Parameter(torch.randn(shape, generator=chance))

        self.tall, self.wide, self.few = weight(13, 8), weight(8, 24), weight(3, 8)
        self.square, self.never = weight(16, 16), weight(5, 8)
        self.bias, self.scale = weight(11), weight()
        for matrix in (self.tall, self.wide, self.few, self.square, self.never):
            matrix.use_muon = True


def build(
    sharding: str, optimizer: str = "muon", precision: str = "fp32", seed: int = 0, **settings: Any
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer; `tensor parallel` cuts some matrices over all ranks and replicates the rest."""
    dtype, more = PRECISIONS[precision]
    name, own = OPTIMIZERS[optimizer]
    model = Model(seed).to(dtype)
    if sharding == "tensor parallel":
        for cut in CUT_OVER_TP:
            param = getattr(model, cut)
            param.data = param.data.chunk(dist.get_world_size())[dist.get_rank()].clone()
            param.tensor_model_parallel, param.partition_dim = True, 0
        sharding, settings["pg_collection"] = "replicated", ProcessGroupCollection(tp=dist.group.WORLD)
    overrides = {ParamKey(name=("bias", "scale")): {"wd_mult": 0.0}}
    given = {**SETTINGS, **more, **own, **settings}
    return model, build_optimizer(model, name, overrides=overrides, sharding=sharding, **given)


def train(model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int]) -> list[float | None]:
    """Take steps with gradients that depend on their number alone; `never` gets none, `few` every other time."""
    norms = []
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=chance).to(param.dtype)
            param.grad = None if name == "never" or (name == "few" and step % 2) else grad
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (step + 1)
        norms.append(optimizer.step().grad_norm)
    return norms


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter, whole."""
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if getattr(param, "tensor_model_parallel", False):
            parts = [torch.empty_like(found[name]) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, found[name])
            found[name] = torch.cat(parts)
    return found


def against_one_process(
    rank: int, size: int, installed: str, precision: str, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return for each optimizer what `rows` makes of the parameters, what one process does, norms, and the report."""
    use(installed)
    results = {}
    for optimizer in OPTIMIZERS:
        made = {}
        for sharding in ("rows", "replicated"):
            model, built = build(sharding, optimizer, precision, **settings)
            made[sharding] = train(model, built, range(5)), values(model)
            if sharding == "rows":
                made["report"] = {row.name: (row.travels, row.bytes) for row in built.report().params}
                exchanges = [part.sharded.exchange for part in built.parts]
                made["owned"] = [info.name for e in exchanges if e is not None for info in e.owned]
        results[optimizer] = made
    return results


def trained_with_ddp(
    rank: int, size: int, installed: str
) -> list[tuple[dict[str, torch.Tensor], list[float | None]]]:
    """Return parameters after training on inputs of each rank's own, sharded and replicated."""
    use(installed)
    results = []
    for sharding in ("rows", "replicated"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 6), nn.LayerNorm(6), nn.Linear(6, 1))
        wrapped = nn.parallel.DistributedDataParallel(model)
        # Norms that are added up in two orders may clip by factors of one unit apart, of which the iteration makes
        # a hundred: a small step keeps that below what is compared.
        built = build_optimizer(wrapped, "muon", sharding=sharding, lr=1e-3, clip_grad=0.5)
        norms = []
        for step in range(5):
            chance = torch.Generator().manual_seed(100 * step + rank)
            wrapped(torch.randn(4, 8, generator=chance)).square().mean().backward()
            norms.append(built.step().grad_norm)
            built.zero_grad()
        results.append((values(model), norms))
    return results


def hop(
    rank: int,
    size: int,
    installed: str,
    folder: str,
    source: str | None,
    target: str | None,
    sharding: str,
    steps: Iterable[int],
    cases: Iterable[str] = CASES,
) -> dict[str, Any]:
    """Load, train, save each of several optimizers; return the parameters after the load and after training."""
    use(installed)
    results = {}
    for case, (optimizer, precision) in cases.items():
        model, built = build(sharding, optimizer, precision, seed=1 if source else 0)
        if source:
            load_checkpoint(f"{folder}/{source}-{case}", model, built)
        loaded = values(model)
        train(model, built, steps)
        save_checkpoint(f"{folder}/{target}-{case}", model, built)
        results[case] = loaded, values(model)
    return results


def refused(rank: int, size: int, installed: str) -> tuple[str, str] | None:
    """Return why a step that cannot be split is not taken."""
    use(installed)
    try:
        build_optimizer(
            Model(), "adaptive_muon", lr=0.1, sharding="rows", adaptive_muon_moment2_method="namo"
        )
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    return None
