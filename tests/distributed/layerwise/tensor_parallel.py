"""A model that tensor parallelism cuts, made from attributes, and one process that has all of it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megaopt_core import MatrixView, build_optimizer
from megaopt_core.optimizers import MegatronOptimizer

SHAPES = {
    "qkv": (48, 16),
    "out": (16, 48),
    "up": (64, 16),
    "down": (16, 64),
    "plain": (24, 16),
    "bias": (64,),
}
CUT = {"qkv": 0, "out": 1, "up": 0, "down": 1, "bias": 0}
LAYERS = 3


def cut(name: str, whole: torch.Tensor, tp: int, place: int) -> torch.Tensor:
    """Return the part of a tensor that a tensor-parallel rank has."""
    kind = name.rpartition(".")[2]
    return whole.chunk(tp, CUT[kind])[place].clone() if kind in CUT else whole.clone()


def make(tp: int = 1, place: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return this rank's part of the model."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList(nn.Module() for _ in range(LAYERS))
    for layer in model:
        for kind, shape in SHAPES.items():
            param = nn.Parameter(cut(kind, torch.randn(shape, generator=generator).to(dtype), tp, place))
            if kind != "bias":
                param.matrix_view = (
                    MatrixView(split_sizes=(8, 8, 8), label="qkv") if kind == "qkv" else MatrixView()
                )
            if kind in CUT and tp > 1:
                param.tensor_model_parallel, param.partition_dim = True, CUT[kind]
            setattr(layer, kind, param)
    return model


def gradients(step: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every parameter."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        f"{layer}.{kind}": torch.randn(shape, generator=generator).to(dtype)
        for layer in range(LAYERS)
        for kind, shape in SHAPES.items()
    }


def mesh_of(size: int, tp: int) -> DeviceMesh | None:
    """Return the mesh of these ranks; None for one process."""
    return init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp")) if size > 1 else None


def build(
    optimizer: str,
    sharding: str,
    tp: int = 1,
    size: int = 1,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> tuple[nn.Module, MegatronOptimizer, int]:
    """Return model, optimizer and this rank's place among the tensor-parallel ones."""
    mesh = mesh_of(size, tp)
    place = mesh["tp"].get_local_rank() if mesh is not None else 0
    model = make(tp, place, dtype)
    given = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0, **settings}
    stepper = build_optimizer(model, optimizer, sharding=sharding, pg_collection=mesh, **given)
    return model, stepper, place


def step_with(
    model: nn.Module,
    stepper: MegatronOptimizer,
    place: int,
    tp: int,
    step: int,
    dtype: torch.dtype,
    missing: Iterable[str] = (),
) -> tuple[Any, ...]:
    """Step on this rank's parts of the whole gradients."""
    whole = gradients(step, dtype)
    for name, param in model.named_parameters():
        param.grad = None if name in missing else cut(name, whole[name], tp, place)
    return tuple(stepper.step())
