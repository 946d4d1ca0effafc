"""A model with everything that strategies trip over, whole or tensor parallel, and given gradients for it."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megaopt_core import MatrixView, ProcessGroupCollection, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.registry import reset_registry

CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "experts": 1}
"""Dimension along which tensor parallelism cuts a parameter."""

SETTINGS = {
    "adam": {"optimizer": "adam", "clip_grad": 0.0},
    "clipped adam": {"optimizer": "adam", "clip_grad": 0.5},
    "bf16 adam": {"optimizer": "adam", "clip_grad": 0.0, "bf16": True},
    "sgd": {"optimizer": "sgd", "clip_grad": 0.0, "sgd_momentum": 0.9},
    "muon": {"optimizer": "muon", "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"},
    "clipped muon": {"optimizer": "muon", "clip_grad": 0.5, "muon_fp32_matmul_prec": "highest", "bf16": True},
}


class Model(nn.Module):
    """Uneven sizes, a tied head, a frozen layer, a scalar, and experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.up = nn.Linear(8, 48)
        self.norm = nn.LayerNorm(48)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Linear(48, 48).requires_grad_(requires_grad=False)
        self.experts = nn.Parameter(torch.randn(5, 16, 8) / 4)
        self.experts.matrix_view = MatrixView(batch_dims=1)
        self.down = nn.Linear(48, 8, bias=False)
        self.head = nn.Linear(8, 31, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits in which every trainable parameter takes part."""
        x = self.embedding(tokens)
        x = x + self.down(self.frozen(self.norm(torch.relu(self.up(x)))) * self.gain)
        mixed = torch.einsum("...i,eoi->...", x, self.experts).tanh()
        return self.head(x + mixed.unsqueeze(-1))


def use(folder: str) -> None:
    """Let this process find what is installed in a folder."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
        reset_registry()


def own_part(name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of a tensor that tensor parallelism may cut."""
    if group is None or name not in CUTS:
        return tensor
    return tensor.chunk(group.size(), CUTS[name])[group.rank()].contiguous()


def make(
    sharding: str, case: str = "bf16 adam", seed: int = 0, groups: Any = None, **more: Any
) -> tuple[nn.Module, MegatronOptimizer]:
    """Return a model and its optimizer; `groups` have a tensor-parallel one where the model is cut."""
    torch.manual_seed(seed)
    settings = {"lr": 1e-2, **SETTINGS.get(case, {"optimizer": case, "clip_grad": 0.0}), **more}
    model = Model().to(torch.bfloat16 if settings.get("bf16") else torch.float32)
    tensor_parallel = groups.tp if groups is not None else None
    for name, param in model.named_parameters():
        param.data = own_part(name, param.data, tensor_parallel)
        if tensor_parallel is not None and name in CUTS:
            param.tensor_model_parallel, param.partition_dim = True, CUTS[name]
    name = settings.pop("optimizer")
    return model, build_optimizer(model, name, sharding=sharding, pg_collection=groups, **settings)


def train(
    model: nn.Module, optimizer: MegatronOptimizer, steps: Iterable[int], groups: Any = None
) -> list[float | None]:
    """Step with gradients that depend on the number of the step alone; return the norms."""
    tensor_parallel = groups.tp if groups is not None else None
    shapes = {name: param.shape for name, param in Model().named_parameters()}
    norms = []
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        for name, param in model.named_parameters():
            whole = torch.randn(shapes[name], generator=chance)
            if param.requires_grad:
                skipped = name == "norm.bias" and step % 2
                param.grad = None if skipped else own_part(name, whole, tensor_parallel).to(param.dtype)
        norms.append(optimizer.step().grad_norm)
    return norms


def two_by(size: int) -> ProcessGroupCollection:
    """Return groups of tensor parallelism of 2; the other ranks are data parallel."""
    from torch.distributed.device_mesh import init_device_mesh

    return ProcessGroupCollection.of(init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp")))


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def gathered(found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join what every rank holds of whole tensors, NaN elsewhere."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, found)
    whole = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = torch.where(whole[key].isnan(), value, whole[key]) if key in whole else value
    return whole
