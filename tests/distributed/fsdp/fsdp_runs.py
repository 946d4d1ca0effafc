"""A model that `fully_shard` cuts over meshes of all kinds, and ways to train it whole and cut."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import ParamsT

from megaopt_core import OptimizerEntry, ProcessGroupCollection, build_optimizer, hookimpl
from megaopt_core.optimizers import MegatronOptimizer

WIDTH, HIDDEN, TOKENS = 12, 20, 11
PRECISE = {"muon_fp32_matmul_prec": "highest"}
OPTIMIZERS = {
    "adam": ("adam", {}),
    "lion": ("lion", {}),
    "muon": ("muon", PRECISE | {"muon_nesterov": True}),
    "adaptive_muon": ("adaptive_muon", PRECISE | {"adaptive_muon_moment2_method": "normuon"}),
    "soap": ("soap", {"soap_fp32_matmul_prec": "highest"}),
    "newcomer": ("newcomer", {}),
    "as_one": ("as_one", {"lr": 0.02}),
}


class Newcomer(torch.optim.Optimizer):
    """A third party's optimizer: it divides momentum by the norm of the whole matrix, and knows nothing of ranks."""

    def __init__(
        self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0.0, momentum: float = 0.9
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def unit(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return the tensors of each norm."""
        return [[param] for param in params]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Step."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 1 - group["momentum"])
            for unit in self.unit(params):
                norm = sum(self.state[param]["average"].square().sum() for param in unit).sqrt() + 1e-8
                for param in unit:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(self.state[param]["average"] / norm, alpha=group["lr"])


class AsOne(Newcomer):
    """The same with one norm for all tensors of a group."""

    def unit(self, params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return all tensors."""
        return [params] if params else []


class ThirdParty:
    """Offers both."""

    megaopt_api = "1"

    @hookimpl
    def megaopt_optimizer_entries(self) -> dict[str, OptimizerEntry]:
        """Return them by name; the first leaves what is no matrix to SGD."""
        return {
            "plain": OptimizerEntry(torch.optim.SGD, supports_fp16=True),
            "newcomer": OptimizerEntry(
                Newcomer,
                granularity="tensor",
                supports_fp16=True,
                accepts=lambda spec, view: None if view is not None else "no matrix",
                fallback="plain",
            ),
            "as_one": OptimizerEntry(AsOne, granularity="group"),
        }


class Block(nn.Module):
    """A normed MLP behind a fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with what the block adds."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks between a table and a head; sizes that few numbers of ranks divide."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.narrow = nn.Linear(WIDTH, 5)
        self.wide = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from itself."""
        x = self.first(self.table(tokens))
        x = x + self.wide(self.narrow(x))
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x * self.scale).flatten(0, 1), tokens.flatten())


def whole_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return Model().to(dtype)


def mesh_of(**dims: int) -> DeviceMesh:
    """Return a mesh with named dimensions."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the dimensions of a mesh that `fully_shard` gets."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))]


def by_columns(param: torch.Tensor) -> Shard | None:
    """Return that matrices are cut along their last dimension, where ranks divide it, as `fully_shard` demands."""
    return Shard(1) if param.ndim > 1 and param.shape[1] % 4 == 0 else None


def cut_model(mesh: DeviceMesh, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    """Return the model over a mesh: tensor parallel along `tp`, then sharded over what begins with `dp`."""
    model = whole_model(seed, dtype)
    if "tp" in mesh.mesh_dim_names:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for block in model.blocks:
        fully_shard(block, mesh=data_mesh(mesh), **options)
    fully_shard(model, mesh=data_mesh(mesh), **options)
    return model


def batch(step: int, replica: int = 0) -> torch.Tensor:
    """Return tokens that differ between steps and replicas."""
    chance = torch.Generator().manual_seed(100 * step + replica)
    return torch.randint(TOKENS, (3, 8), generator=chance)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all of a tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def replicas_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Return how many data-parallel ranks a mesh has, and which this one is."""
    place, count = 0, 1
    for name in mesh.mesh_dim_names:
        if name.startswith("dp"):
            place = place * mesh[name].size() + mesh.get_local_rank(name)
            count *= mesh[name].size()
    return count, place


@contextmanager
def nothing_gathered() -> Iterator[None]:
    """Let every way to gather a tensor raise."""
    of_tensors = {name: _raises(name) for name in ("full_tensor", "redistribute")}
    of_groups = {
        name: _raises(name) for name in ("all_gather", "all_gather_into_tensor", "broadcast", "gather")
    }
    with mock.patch.multiple(DTensor, **of_tensors), mock.patch.multiple(dist, **of_groups):
        yield


def _raises(name: str) -> Callable[..., None]:
    def gather(*arguments, **more):
        raise AssertionError(f"{name} is called in a step")

    return gather


def train(
    model: nn.Module,
    optimizer: MegatronOptimizer,
    steps: Iterable[int],
    mesh: DeviceMesh | None = None,
    replicas: int = 1,
) -> list[float | None]:
    """Step on the batches of all replicas; return the norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        if mesh is None:
            sum(model(batch(step, replica)) / replicas for replica in range(replicas)).backward()
        else:
            model(batch(step, replicas_of(mesh)[1])).backward()
        with nothing_gathered():
            norms.append(optimizer.step().grad_norm)
    return norms


def train_with_gradients_of(
    cut: nn.Module,
    optimizer: MegatronOptimizer,
    reference: nn.Module,
    other: MegatronOptimizer,
    steps: Iterable[int],
    mesh: DeviceMesh,
) -> tuple[list[float], list[float]]:
    """Step a cut model, and a whole one with the same gradients; return the norms of both."""
    norms, expected = [], []
    for step in steps:
        optimizer.zero_grad()
        cut(batch(step, replicas_of(mesh)[1])).backward()
        for name, param in cut.named_parameters():
            reference.get_parameter(name).grad = None if param.grad is None else whole(param.grad)
        with nothing_gathered():
            norms.append(optimizer.step().grad_norm)
        expected.append(other.step().grad_norm)
    return norms, expected


def build(model: nn.Module, kind: str, groups: Any = None, **more: Any) -> MegatronOptimizer:
    """Return an optimizer that clips."""
    name, settings = OPTIMIZERS[kind]
    settings = {"lr": 0.004, "weight_decay": 0.1, "clip_grad": 0.5} | settings | more
    return build_optimizer(model, name, pg_collection=groups, **settings)


def alone() -> ProcessGroupCollection:
    """Return the groups of a model that is on this rank alone."""
    return ProcessGroupCollection()


def require_close(model: nn.Module, reference: nn.Module, tolerance: float = 1e-6) -> None:
    """Raise unless the parameters of a cut model are those of a whole one."""
    for name, param in model.named_parameters():
        expected = reference.get_parameter(name).detach()
        torch.testing.assert_close(
            whole(param), expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def installed() -> list[str]:
    """Return the kinds whose optimizer is here."""
    plugin = {"adaptive_muon": "muon"}
    own = ("newcomer", "as_one")
    names = {kind: name for kind, (name, _) in OPTIMIZERS.items()}
    return [
        kind for kind, name in names.items() if kind in own or find_spec(f"megaopt_{plugin.get(name, name)}")
    ]
