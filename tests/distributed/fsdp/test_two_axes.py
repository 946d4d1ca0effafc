"""What expert and tensor parallelism cut at once has one owner among all ranks that hold a part of it."""

from collections.abc import Collection

import pytest
import torch
from long_runs import sometimes
from torch import nn

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_muon")
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

SHAPES = {"matrix": (16, 12), "uneven": (9, 14), "experts": (4, 12, 16), "heads": (4, 6, 10)}
PRECISE = {"muon": "muon_fp32_matmul_prec", "soap": "soap_fp32_matmul_prec"}


def train(
    rank: int, size: int, optimizer: str, missing: Collection[str] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Step on given gradients, some of which the first step lacks; return whole values, owners and what was sent."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp")) if size > 1 else None

    def cut(whole):
        return whole.clone() if mesh is None else distribute_tensor(whole, mesh, [Shard(0), Shard(1)])

    chance, model = torch.Generator().manual_seed(0), nn.Module()
    for name, shape in SHAPES.items():
        param = nn.Parameter(cut(torch.randn(shape, generator=chance)))
        param.matrix_view = (
            MatrixView(transposed=True, first_dims=2)
            if name == "heads"
            else MatrixView(batch_dims=len(shape) - 2)
        )
        model.register_parameter(name, param)
    settings = {"lr": 0.01, "clip_grad": 0.0, PRECISE[optimizer]: "highest"}
    sharding = "replicated" if mesh is None else "fsdp"
    stepper = build_optimizer(model, optimizer, sharding=sharding, pg_collection=mesh, **settings)
    for step in range(3):
        chance = torch.Generator().manual_seed(1 + step)
        for name, param in model.named_parameters():
            grad = cut(torch.randn(SHAPES[name], generator=chance))
            param.grad = None if step == 0 and name in missing else grad
        stepper.step()
    values = {
        name: param.detach().clone() if mesh is None else param.full_tensor().detach()
        for name, param in model.named_parameters()
    }
    return values, {row.name: row.owner for row in stepper.report().params}


@pytest.mark.parametrize("optimizer", sometimes(["muon", "soap"], ["muon"]))
def test_a_matrix_that_two_axes_cut_is_stepped_whole_by_one_owner(launch, optimizer):
    """Parts of even and uneven matrices and of experts, on a grid without other data parallelism: one process' bits."""
    pytest.importorskip("megaopt_soap" if optimizer == "soap" else "megaopt_muon")
    missing = ("uneven",)
    alone, _ = train(0, 1, optimizer, missing)
    for values, owners in launch(train, 4, optimizer, missing):
        assert {name: torch.equal(value, alone[name]) for name, value in values.items()} == dict.fromkeys(
            SHAPES, True
        )
        assert len(set(owners.values())) >= 3
        assert all("ep" in owner and "expert_tp" in owner for owner in owners.values())
