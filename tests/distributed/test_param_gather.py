"""Training with gathers that end late gives the bits of training without overlap."""

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from torch.nn.functional import linear

from megaopt_core import build_optimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1}


class Tied(nn.Module):
    """Layers tied by memory, of which the later one runs first, and a weight that is read before its layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 16, bias=False)
        self.middle = nn.Linear(16, 16)
        self.first = nn.Linear(16, 16, bias=False)
        self.first.weight = nn.Parameter(self.last.weight.data)
        self.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(linear(x, self.head.weight.t())))))
        return self.head(torch.tanh(self.last(hidden)))


def trained(rank: int, overlap: bool) -> list[torch.Tensor]:
    """Return all outputs and the parameters after five steps, in which the second rank is late."""
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **(OVERLAP if overlap else {}))
    model = DistributedDataParallel(Tied(), config)
    optimizer = build_optimizer(
        model, "sgd", lr=0.1, sharding="distributed", clip_grad=0.0, overlap_param_gather=overlap
    )
    outputs = []
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        out = model(torch.randn(4, 16, generator=generator))
        outputs.append(out.detach().clone())
        out.square().mean().backward()
        if overlap and rank == 1:
            time.sleep(0.1)
        optimizer.step()
        optimizer.zero_grad()
    return [*outputs, *(value.clone() for value in model.module.state_dict().values())]


def compare_with_no_overlap(rank: int, size: int) -> list[int]:
    """Return what is different."""
    pairs = zip(trained(rank, False), trained(rank, True), strict=True)
    return [index for index, (one, other) in enumerate(pairs) if not torch.equal(one, other)]


def test_no_forward_pass_reads_stale_parameters(launch):
    """Outputs and, through the bare module's state dict, parameters; on the rank that waits for the late one too."""
    pytest.importorskip("megaopt_distributed")
    assert launch(compare_with_no_overlap, 2) == [[], []]


def scaled_under_way(rank: int, size: int, overlap: bool) -> list[torch.Tensor]:
    """Return the parameters after steps whose gradients are scaled right after the backward pass."""
    torch.manual_seed(0)
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=1 if overlap else None)
    model = DistributedDataParallel(Tied(), config)
    grads = []
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        if rank == 1:
            time.sleep(0.1)
        model.scale_gradients(0.25)
        model.finish_grad_sync()
        grads += [
            param.main_grad.clone() for param in model.module.parameters() if hasattr(param, "main_grad")
        ]
        model.zero_grad_buffer()
    return grads


def test_gradients_are_scaled_once_on_all_ranks(launch):
    """Also where buckets are being reduced when they are to be scaled."""
    (expected, _), (overlapped, late) = launch(scaled_under_way, 2, False), launch(scaled_under_way, 2, True)
    for want, first, second in zip(expected, overlapped, late, strict=True):
        torch.testing.assert_close(first, want, rtol=1e-6, atol=0)
        assert torch.equal(first, second)


def too_large(rank: int, size: int, value: float, settings: Mapping[str, Any]) -> str | None:
    """Return the error when the second rank has one large gradient in fp16."""
    model = DistributedDataParallel(
        nn.Linear(2, 2, dtype=torch.float16), DistributedDataParallelConfig(**settings)
    )
    if rank == 1:
        model.module.bias.main_grad[1] = value
    try:
        model.finish_grad_sync()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return str(error)
    return None


@pytest.mark.parametrize(("value", "found"), [(40_000.0, True), (30_000.0, False), (float("nan"), True)])
def test_gradients_that_ranks_cannot_add_up_are_found(launch, value, found):
    """Two ranks can add up half of what the dtype holds."""
    message = "gradients are not finite, or too large to be added up over all ranks: 'bias' on rank 1"
    assert launch(too_large, 2, value, {"check_for_large_grads": True}) == [message if found else None] * 2
