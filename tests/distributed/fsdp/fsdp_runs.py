"""A model that `fully_shard` cuts over meshes of all kinds, and ways to train it whole and cut."""

from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megaopt_core import ProcessGroupCollection, build_optimizer

WIDTH, HIDDEN, TOKENS = 12, 20, 11
PRECISE = {"muon_fp32_matmul_prec": "highest"}
OPTIMIZERS = {
    "adam": ("adam", {}),
    "lion": ("lion", {}),
    "muon": ("muon", PRECISE | {"muon_nesterov": True}),
    "adaptive_muon": ("adaptive_muon", PRECISE | {"adaptive_muon_moment2_method": "normuon"}),
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
        self.narrow = nn.Linear(WIDTH, 3)
        self.wide = nn.Linear(3, WIDTH)
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


def whole_model(seed: int = 0) -> Model:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return Model()


def mesh_of(**dims: int):
    """Return a mesh with named dimensions."""
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def data_mesh(mesh):
    """Return the dimensions of a mesh that `fully_shard` gets."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))]


def cut_model(mesh, seed: int = 0, **options) -> Model:
    """Return the model over a mesh: tensor parallel along `tp`, then sharded over what begins with `dp`."""
    model = whole_model(seed)
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


def replicas_of(mesh) -> tuple[int, int]:
    """Return how many data-parallel ranks a mesh has, and which this one is."""
    place, count = 0, 1
    for name in mesh.mesh_dim_names:
        if name.startswith("dp"):
            place = place * mesh[name].size() + mesh.get_local_rank(name)
            count *= mesh[name].size()
    return count, place


def train(model: nn.Module, optimizer, steps, mesh=None, replicas: int = 1) -> list[float]:
    """Step on the batches of all replicas; return the norms."""
    norms = []
    for step in steps:
        optimizer.zero_grad()
        if mesh is None:
            sum(model(batch(step, replica)) / replicas for replica in range(replicas)).backward()
        else:
            model(batch(step, replicas_of(mesh)[1])).backward()
        norms.append(optimizer.step().grad_norm)
    return norms


def build(model: nn.Module, kind: str, groups=None, **more):
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
    names = {kind: name for kind, (name, _) in OPTIMIZERS.items()}
    return [kind for kind, name in names.items() if find_spec(f"megaopt_{plugin.get(name, name)}")]
