"""A rank that dies in the middle of a step stops the others, and the run resumes from its checkpoint."""

import os
import signal
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from megaopt_checkpoint import load_checkpoint, save_checkpoint
from megaopt_distributed import DistributedDataParallel, DistributedDataParallelConfig
from models import awkward, batch, loss_of, values_of
from torch import nn

from megaopt_core import build_optimizer
from megaopt_core.errors import CommunicationError
from megaopt_core.optimizers import MegatronOptimizer

pytestmark = [pytest.mark.any_python, pytest.mark.distributed]


def build() -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Return a wrapped model and its optimizer."""
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=400
    )
    model = DistributedDataParallel(awkward(), config)
    return model, build_optimizer(model, "adam", lr=1e-2, sharding="distributed", clip_grad=0.0)


def train(model: nn.Module, optimizer: MegatronOptimizer, rank: int, steps: Iterable[int]) -> None:
    """Train for some steps."""
    for step in steps:
        loss_of(model, batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def dies_in_mid_step(rank: int, size: int, folder: str) -> str:
    """Save after three steps; rank 1 is killed inside of the fifth; the others report their error."""
    model, optimizer = build()
    train(model, optimizer, rank, range(3))
    save_checkpoint(f"{folder}/last", model, optimizer)
    train(model, optimizer, rank, range(3, 4))
    loss_of(model, batch(4, rank)).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.step()
    except CommunicationError as error:
        return str(error)
    return "no error"


def hangs_in_mid_step(rank: int, size: int) -> str:
    """Rank 1 stops for ever before its backward pass; the others report their error."""
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    model, optimizer = build()
    train(model, optimizer, rank, range(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        train(model, optimizer, rank, range(2, 3))
    except CommunicationError as error:
        return str(error)
    finally:
        os.kill(pids[1], signal.SIGKILL)
    return "no error"


def resumes(rank: int, size: int, folder: str) -> dict[str, torch.Tensor]:
    """Load what was saved and go on to the sixth step."""
    model, optimizer = build()
    load_checkpoint(f"{folder}/last", model, optimizer)
    train(model, optimizer, rank, range(3, 6))
    return values_of(model.module)


def undisturbed(rank: int, size: int) -> dict[str, torch.Tensor]:
    """Train six steps without any accident."""
    model, optimizer = build()
    train(model, optimizer, rank, range(6))
    return values_of(model.module)


def test_the_others_fail_in_time_and_the_run_resumes(launch, tmp_path):
    """The error says what to do; the resumed run has the bits of an undisturbed one."""
    error, _ = launch(dies_in_mid_step, 2, str(tmp_path), group_timeout=10.0, may_die=True)
    assert "another rank has stopped" in error
    assert "Restart all ranks from the last checkpoint" in error
    expected, resumed = launch(undisturbed, 2), launch(resumes, 2, str(tmp_path))
    for rank in range(2):
        for name, value in expected[rank].items():
            assert torch.equal(value, resumed[rank][name]), name


def test_a_rank_that_hangs_is_given_up_after_the_timeout(launch):
    """Its connection is still there: the reduce-scatter ends with the process group's timeout."""
    error, _ = launch(hangs_in_mid_step, 2, group_timeout=8.0, may_die=True)
    assert error.startswith("reduce-scatter of ")
    assert "the process group's timeout is over" in error
