"""The distributed optimizer takes the same steps as a replicated one."""

import pytest
import torch
from models import awkward, batch, loss_of, values_of
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megaopt_core import DistributedDataParallel, DistributedDataParallelConfig, build_optimizer


def train_under_torch_ddp(rank, size, optimizer, sharding, settings):
    """Train under torch's DDP and return every parameter."""
    model = awkward()
    wrapped = TorchDDP(model)
    stepper = build_optimizer(wrapped, optimizer, lr=1e-2, sharding=sharding, **settings)
    for step in range(10):
        loss_of(wrapped, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    return values_of(model)


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_under_torch_ddp_bits_are_those_of_a_replicated_optimizer(launch, optimizer):
    """Two ranks, ten steps, nothing clipped: every bit of every parameter on every rank."""
    settings = {"clip_grad": 0.0, "weight_decay": 0.1}
    replicated = launch(train_under_torch_ddp, 2, optimizer, "replicated", settings)
    sharded = launch(train_under_torch_ddp, 2, optimizer, "distributed", settings)
    for name, value in replicated[0].items():
        for rank in range(2):
            assert torch.equal(value, sharded[rank][name]), name


def train_in_buffers(rank, size, optimizer, sharding, settings, ddp, build=None):
    """Train under our own wrapper and return every parameter and the state that this rank holds."""
    build = build or {}
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharding == "distributed", **ddp)
    model = DistributedDataParallel(awkward(**build), config)
    stepper = build_optimizer(model, optimizer, lr=1e-2, sharding=sharding, **settings)
    for step in range(10):
        loss_of(model, batch(step, rank)).backward()
        stepper.step()
        stepper.zero_grad()
    model.finish_param_sync()
    return values_of(model.module)


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 400}


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_in_buffers_bits_are_those_of_a_replicated_optimizer(launch, optimizer):
    """With and without overlaps, and the same as under torch's DDP."""
    settings = {"clip_grad": 0.0, "weight_decay": 0.1}
    expected = launch(train_under_torch_ddp, 2, optimizer, "replicated", settings)[0]
    gather = {**settings, "overlap_param_gather": True}
    runs = {
        "replicated": launch(train_in_buffers, 2, optimizer, "replicated", settings, {}),
        "replicated, overlap": launch(train_in_buffers, 2, optimizer, "replicated", settings, OVERLAP),
        "distributed": launch(train_in_buffers, 2, optimizer, "distributed", settings, {}),
        "distributed, overlaps": launch(
            train_in_buffers, 2, optimizer, "distributed", gather, {**OVERLAP, "overlap_param_gather": True}
        ),
    }
    for run, ranks in runs.items():
        for values in ranks:
            assert [name for name, value in expected.items() if not torch.equal(value, values[name])] == [], (
                run
            )
