"""A model that torch's tensor parallelism cuts into DTensors, and ways to train it whole and cut."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

WIDTH, HIDDEN = 12, 20
ADAPTIVE = {"muon_fp32_matmul_prec": "highest", "adaptive_muon_moment2_method": "normuon"}
OPTIMIZERS = {
    "adam": ("adam", {}),
    "lion": ("lion", {}),
    "muon duplicated": ("muon", {"muon_tp_mode": "duplicated", "muon_fp32_matmul_prec": "highest"}),
    "muon distributed": ("muon", {"muon_tp_mode": "distributed", "muon_fp32_matmul_prec": "highest"}),
    "adaptive_muon": ("adaptive_muon", ADAPTIVE | {"muon_tp_mode": "distributed"}),
}


class Block(nn.Module):
    """A normed MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with what the block adds."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks that will be cut, and a layer and a scale that will not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


def whole_model(seed: int = 0) -> Model:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return Model()


def cut_model(mesh: DeviceMesh, seed: int = 0) -> Model:
    """Return the same model over the ranks of a mesh: the second block's norm works on a part of the sequence."""
    model = whole_model(seed)
    linear = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model.blocks[0], mesh, linear)
    sequence = {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    parallelize_module(model.blocks[1], mesh, sequence)
    model.blocks[1].register_forward_hook(
        lambda _module, _input, output: output.redistribute(placements=[Replicate()]).to_local()
    )
    return model


def mesh_of(**dims: int) -> DeviceMesh:
    """Return a mesh with named dimensions."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def batch(step: int, replica: int = 0) -> torch.Tensor:
    """Return sequences that differ between steps and replicas."""
    chance = torch.Generator().manual_seed(100 * step + replica)
    return torch.randn(3, 8, WIDTH, generator=chance)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all of a tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def average_over(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Average gradients over data-parallel ranks, as torch's DDP would."""
    for param in model.parameters():
        grad = getattr(param.grad, "_local_tensor", param.grad)
        dist.all_reduce(grad, group=group)
        grad /= group.size()


def train(
    model: nn.Module,
    optimizer: MegatronOptimizer,
    steps: Iterable[int],
    replicas: int = 1,
    mesh: DeviceMesh | None = None,
) -> list[float | None]:
    """Step on the batches of all replicas; return the norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        if mesh is None or "dp" not in mesh.mesh_dim_names:
            sum(
                model(batch(step, replica)).square().sum() / replicas for replica in range(replicas)
            ).backward()
        else:
            model(batch(step, mesh.get_local_rank("dp"))).square().sum().backward()
            average_over(model, mesh.get_group("dp"))
        norms.append(optimizer.step().grad_norm)
    return norms


def build(model: nn.Module, kind: str, groups: Any, **more: Any) -> MegatronOptimizer:
    """Return an optimizer that clips."""
    name, settings = OPTIMIZERS[kind]
    settings = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 1.0} | settings | more
    return build_optimizer(model, name, pg_collection=groups, **settings)


def installed() -> list[str]:
    """Return the kinds whose optimizer is here."""
    plugin = {"adaptive_muon": "muon"}
    names = {kind: name for kind, (name, _) in OPTIMIZERS.items()}
    return [kind for kind, name in names.items() if find_spec(f"megaopt_{plugin.get(name, name)}")]
