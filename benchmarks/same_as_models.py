"""Small models for `benchmarks/same_as.py`, and gradients that depend on names and steps alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megaopt_core import MatrixView

__all__ = [
    "Net",
    "TensorParallelNet",
    "backward",
    "give_grads",
    "gradient",
    "mark_experts",
    "mesh_of",
    "named_params",
    "shard_with_fsdp",
    "tokens",
]

VOCABULARY, WIDTH, HIDDEN = 24, 16, 40


class Block(nn.Module):
    """A normed block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states with the block's update."""
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + torch.softmax(query @ key.mT / 4, -1) @ value
        return hidden + self.down(torch.relu(self.up(hidden)))


class Net(nn.Module):
    """A table, blocks with matrices and vectors, a gain of one element and a head; weights say what they are.

    So no reader of roles decides anything, which may be another one in another tree.
    """

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.mark()
        for index, param in enumerate(self.parameters()):
            with torch.no_grad():
                param.copy_(_noise(param.shape, index) * 0.1 + 0.05)

    def mark(self) -> None:
        """Say what weights are; FSDP2 replaces parameters, and what they said goes with them."""
        self.head.weight.is_embedding_or_output_parameter = True
        for block in self.blocks:
            block.qkv.weight.matrix_view = MatrixView(split_sizes=(WIDTH, WIDTH, WIDTH), label="qkv")
            block.up.weight.matrix_view = MatrixView()
            block.down.weight.matrix_view = MatrixView()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from itself."""
        hidden = self.table(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.cross_entropy(
            self.head(hidden * self.gain).float().flatten(0, 1), batch.flatten()
        )


class TensorParallelNet(nn.Module):
    """Matrices of which each tensor-parallel rank holds a part, and parameters that every rank has whole.

    Args:
        ranks: how many tensor-parallel ranks there are.
        place: which of them this is.
    """

    CUT: ClassVar[dict[str, int]] = {"qkv": 0, "up": 0, "down": 1, "bias": 0}
    SHAPES: ClassVar[dict[str, tuple[int, ...]]] = {
        "qkv": (48, 16),
        "up": (64, 16),
        "down": (16, 64),
        "plain": (24, 16),
        "bias": (64,),
        "norm": (16,),
    }

    def __init__(self, ranks: int, place: int) -> None:
        super().__init__()
        self.ranks, self.place = ranks, place
        for index, (name, shape) in enumerate(self.SHAPES.items()):
            param = nn.Parameter(self.part(name, _noise(shape, index) * 0.1))
            if len(shape) == 2:
                param.matrix_view = (
                    MatrixView(split_sizes=(8, 8, 8), label="qkv") if name == "qkv" else MatrixView()
                )
            if name in self.CUT and ranks > 1:
                param.tensor_model_parallel, param.partition_dim = True, self.CUT[name]
            self.register_parameter(name, param)

    def part(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that this rank has."""
        return (
            whole.chunk(self.ranks, self.CUT[name])[self.place].clone() if name in self.CUT else whole.clone()
        )


def _noise(shape: tuple[int, ...] | torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every parameter by the name that it has without wrappers."""
    for name, param in model.named_parameters():
        yield name.removeprefix("module."), param


def gradient(name: str, shape: tuple[int, ...] | torch.Size, step: int) -> torch.Tensor:
    """Return a gradient in fp32 that depends on name, shape and step alone; the norm of all is above 1."""
    digest = hashlib.sha1(f"{name}/{step}".encode(), usedforsecurity=False).digest()
    return _noise(shape, int.from_bytes(digest[:6], "big"))


def give_grads(model: nn.Module, step: int, *, scale: float = 1.0, without: tuple[str, ...] = ()) -> None:
    """Give every parameter that trains its gradient of a step.

    Args:
        model: bare, tensor parallel or cut by FSDP2.
        step: which step.
        scale: the loss scale.
        without: parameters that get none.
    """
    for name, param in named_params(model):
        if not param.requires_grad or name in without:
            param.grad = None
            continue
        if isinstance(model, TensorParallelNet):
            grad = model.part(name, gradient(name, model.SHAPES[name], step))
        else:
            grad = gradient(name, param.shape, step)
        grad = (grad * scale).to(param.dtype)
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def tokens(step: int, rank: int) -> torch.Tensor:
    """Return a batch that differs between steps and ranks."""
    return torch.randint(VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def backward(model: nn.Module, step: int, rank: int, scale: float = 1.0) -> None:
    """Make gradients by a forward and backward pass over a rank's own batch."""
    (model(tokens(step, rank)) * scale).backward()


def mesh_of(**dims: int) -> DeviceMesh:
    """Return a mesh of CPU ranks with named dimensions."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def shard_with_fsdp(model: Net, mesh: DeviceMesh) -> Net:
    """Cut a model with FSDP2, block by block."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.mark()
    return model


def mark_experts(model: Net) -> Net:
    """Mark the feed-forward weights as experts', which are reduced over their own group."""
    for block in model.blocks:
        for layer in (block.up, block.down):
            for param in layer.parameters():
                param.allreduce = False
    return model
