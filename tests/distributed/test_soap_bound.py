"""SOAP's bound on updates, and its warning of long ones, under every strategy that steps it."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from megaopt_core import MatrixView, build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

pytest.importorskip("megaopt_fsdp")
pytest.importorskip("megaopt_soap")

SIZE = 24


def whole(param: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter's value, put together from all ranks."""
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()


def trained(
    rank: int, size: int, sharding: str, bound: float | None
) -> tuple[list[torch.Tensor], float, list[str]]:
    """Step with gradients of rank one.

    Returns:
        The matrices whole, the longest step as a multiple of the learning rate, and what this rank was warned of.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False))
    for layer in model:
        layer.weight.matrix_view = MatrixView()
    if sharding == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    settings = {"clip_grad": 0.0, "weight_decay": 0.0, "soap_max_update_rms": bound}
    optimizer = build_optimizer(model, "soap", lr=0.01, sharding=sharding, **settings)
    chance = torch.Generator().manual_seed(0)
    longest = 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(12):
            before = [whole(param) for param in model.parameters()]
            for param in model.parameters():
                grad = torch.randn(SIZE, 1, generator=chance) @ torch.randn(1, SIZE, generator=chance)
                if sharding == "fsdp":
                    grad = distribute_tensor(grad, param.device_mesh, param.placements)
                param.grad = grad
            optimizer.step()
            moved = [whole(param) - value for param, value in zip(model.parameters(), before, strict=True)]
            longest = max(longest, *(change.square().mean().sqrt().item() / 0.01 for change in moved))
    said = [str(warning.message) for warning in caught if str(warning.message).startswith("SOAP moved")]
    return [whole(param) for param in model.parameters()], longest, said


@pytest.mark.parametrize("sharding", ["replicated", "layer_wise", "fsdp"])
def test_owners_bound_and_warn_as_one_process_does(launch, sharding):
    """A bounded run has no long step; a run without a bound is warned of once on each rank that owns a matrix."""
    for _, longest, said in launch(trained, 2, sharding, 1.0):
        assert longest <= 1.001
        assert said == []
    unbounded = launch(trained, 2, sharding, None)
    assert all(longest > 10 for _, longest, _ in unbounded)
    warned = [[text.split()[2] for text in said] for _, _, said in unbounded]
    assert sorted(warned) in (
        [["'0.weight'"], ["'0.weight'"]],  # each rank steps both
        [["'0.weight'"], ["'1.weight'"]],  # each owns one
        [[], ["'0.weight'"]],  # one owns both
    )


def test_a_bound_under_layer_wise_ends_with_the_bits_of_replicas(launch):
    """Owners bound what a replicated optimizer bounds on every rank."""
    expected = launch(trained, 2, "replicated", 1.0)[0][0]
    for values, _, _ in launch(trained, 2, "layer_wise", 1.0):
        assert all(torch.equal(value, other) for value, other in zip(values, expected, strict=True))
