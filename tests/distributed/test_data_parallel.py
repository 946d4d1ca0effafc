"""DistributedDataParallel reduces the right gradients, however the backward pass goes."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import awkward, batch, loss_of, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils.checkpoint import checkpoint

from megaopt_core import ProcessGroupCollection
from megaopt_core.errors import GradientError

pytestmark = pytest.mark.distributed

OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 400}


def main_grads(model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """Return copies of the gradients by name."""
    return {
        name: param.main_grad.clone()
        for name, param in model.module.named_parameters()
        if param.requires_grad
    }


def torch_grads(
    rank: int, build: Callable[[], nn.Module], steps: int = 1, micro_batches: int = 1
) -> dict[str, torch.Tensor]:
    """Return the gradients of torch's own DDP."""
    model = build()
    wrapped = TorchDDP(model, find_unused_parameters=True)
    for step in range(steps):
        wrapped.zero_grad()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            context = torch.enable_grad() if last else wrapped.no_sync()
            with context:
                loss_of(wrapped, batch(10 * step + number, rank)).backward()
    zero = torch.zeros(())
    return {
        name: (zero.expand_as(param) if param.grad is None else param.grad).clone()
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def our_grads(
    rank: int,
    build: Callable[[], nn.Module],
    steps: int = 1,
    micro_batches: int = 1,
    no_sync: bool = True,
    zero_with_buffer: bool = True,
    **ddp: Any,
) -> dict[str, torch.Tensor]:
    """Return the gradients of our wrapper."""
    model = DistributedDataParallel(build(), DistributedDataParallelConfig(**ddp))
    for step in range(steps):
        if step:
            model.zero_grad_buffer()
        for number in range(micro_batches):
            last = number == micro_batches - 1
            with torch.enable_grad() if last or not no_sync else model.no_sync():
                loss_of(model, batch(10 * step + number, rank)).backward()
        model.finish_grad_sync()
    return main_grads(model)


def compare_accumulation(rank: int, size: int) -> list[tuple[str, str]]:
    """Compare several backward passes a step with torch's DDP; return what is different."""
    expected = torch_grads(rank, awkward, steps=3, micro_batches=3)
    runs = {
        "plain": our_grads(rank, awkward, steps=3, micro_batches=3),
        "overlap": our_grads(rank, awkward, steps=3, micro_batches=3, **OVERLAP),
        "overlap, no_sync not used": our_grads(
            rank, awkward, steps=3, micro_batches=3, no_sync=False, **OVERLAP
        ),
        "average": our_grads(rank, awkward, steps=3, micro_batches=3, average_in_collective=True),
    }
    return differing(expected, runs)


def differing(
    expected: Mapping[str, torch.Tensor], runs: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[tuple[str, str]]:
    """Return which gradients differ in which run."""
    return [
        (run, name)
        for run, grads in runs.items()
        for name, grad in expected.items()
        if not torch.allclose(grad, grads[name], rtol=1e-6, atol=1e-7)
    ]


def test_accumulation_gives_the_gradients_of_torchs_ddp(launch):
    """Several backward passes a step, with no_sync or without it."""
    assert launch(compare_accumulation, 2) == [[], []]


class Checkpointed(nn.Module):
    """A block that is used twice, inside of activation checkpoints, a tied head and an unused layer."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embedding.weight
        self.reentrant = reentrant

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for _ in range(2):
            if self.reentrant is None:
                hidden = self.block(hidden)
            else:
                hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def checkpointed(reentrant: bool | None = None) -> Checkpointed:
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return Checkpointed(reentrant=reentrant)


def compare_checkpointing(rank: int, size: int) -> list[tuple[str, str]]:
    """Compare both kinds of checkpointing with none; return what is different."""
    expected = torch_grads(rank, checkpointed, steps=3)
    runs = {
        "plain": our_grads(rank, checkpointed, steps=3),
        "not reentrant": our_grads(rank, lambda: checkpointed(False), steps=3, **OVERLAP),
        "reentrant": our_grads(rank, lambda: checkpointed(True), steps=3, **OVERLAP),
    }
    return differing(expected, runs)


def test_activation_checkpointing_changes_no_gradient(launch):
    """Reentrant checkpointing hands a tied block's gradient over twice; overlap learns that in the first step."""
    assert launch(compare_checkpointing, 2) == [[], []]


def overlapped_buckets(rank: int, size: int) -> tuple[list[int], int]:
    """Return how many buckets are being reduced when the backward pass ends, for two steps."""
    model = DistributedDataParallel(awkward(), DistributedDataParallelConfig(**OVERLAP))
    counts = []
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        counts.append(sum(bucket.grad_state.name == "UNDER_WAY" for bucket in model.buckets))
        model.finish_grad_sync()
        model.zero_grad_buffer()
    return counts, len(model.buckets)


def test_reductions_start_during_the_backward_pass(launch):
    """The first backward pass is only watched; from the second on every bucket is started by the pass itself."""
    counts, buckets = launch(overlapped_buckets, 2)[0]
    assert buckets > 2
    assert counts == [0, buckets]


def non_finite(rank: int, size: int, overlap: bool) -> tuple[str, tuple[str, ...]] | None:
    """Put a NaN into one gradient on rank 1 and return the error of this rank."""
    settings = OVERLAP if overlap else {}
    model = DistributedDataParallel(
        awkward(), DistributedDataParallelConfig(check_for_nan_in_grad=True, **settings)
    )
    for step in range(2):
        loss = loss_of(model, batch(step, rank))
        if rank == 1 and step == 1:
            loss = loss + (model.module.down.weight[0, 0] * float("nan"))
        loss.backward()
        try:
            model.finish_grad_sync()
        except GradientError as error:
            return str(error), error.names
        model.zero_grad_buffer()
    return None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_gradient_that_is_not_finite_is_named_on_every_rank(launch, overlap):
    """Parameter and rank, on the ranks that had nothing wrong too."""
    expected = ("gradients are not finite: 'down.weight' on rank 1", ("down.weight",))
    assert launch(non_finite, 2, overlap) == [expected, expected]


class WithExpert(nn.Module):
    """A dense layer, and one whose parameters belong to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)
        for param in self.expert.parameters():
            param.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.relu(self.dense(x)))


def expert_gradients(rank: int, size: int) -> list[tuple[bool, float]]:
    """Reduce dense gradients over four ranks, those of experts over two."""
    pairs = [torch.distributed.new_group([first, first + 2]) for first in range(2)]
    world = torch.distributed.group.WORLD
    pgs = ProcessGroupCollection(dp=world, dp_cp=world, expt_dp=pairs[rank % 2])
    torch.manual_seed(0)
    found = []
    for sharded in (False, True):
        config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
        model = DistributedDataParallel(WithExpert(), config, pgs)
        for buffer in model.param_and_grad_buffers.values():
            buffer.grad_data.fill_(float(rank + 1))
        model.finish_grad_sync()
        for key, buffer in model.param_and_grad_buffers.items():
            for bucket in buffer.buckets:
                low, high = bucket.shard_range(bucket.grad_data.numel()) if sharded else (0, None)
                (value,) = bucket.grad_data[low:high].unique().tolist()
                found.append((key.is_expert, value))
    return found


def test_expert_gradients_are_reduced_over_their_own_ranks(launch):
    """The sum runs over the expert group; the mean is that of the whole batch, which all data-parallel ranks share."""
    dense = (1 + 2 + 3 + 4) / 4
    for rank, found in enumerate(launch(expert_gradients, 4)):
        expert = ((1 + 3) if rank % 2 == 0 else (2 + 4)) / 4
        assert sorted(found) == [(False, dense), (False, dense), (True, expert), (True, expert)]


def broadcast_and_scale(rank: int, size: int) -> tuple[dict[str, torch.Tensor], bool]:
    """Return parameters after a broadcast and gradients after scaling."""
    model = DistributedDataParallel(
        awkward(seed=rank), DistributedDataParallelConfig(use_distributed_optimizer=True)
    )
    model.broadcast_params()
    loss_of(model, batch(0, rank)).backward()
    before = main_grads(model)
    model.scale_gradients(0.5)
    halved = all(torch.equal(grad * 0.5, main_grads(model)[name]) for name, grad in before.items())
    return values_of(model.module), halved


def test_parameters_are_broadcast_and_gradients_scaled(launch):
    """All ranks begin with the parameters of the first."""
    (first, _), (second, _) = results = launch(broadcast_and_scale, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [halved for _, halved in results] == [True, True]
