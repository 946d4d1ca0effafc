"""Carrying a save out: torch's plan, this process's part of it, and what is said when it fails."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megaopt_checkpoint.writer import CheckpointWriter
from megaopt_core.errors import CheckpointError

__all__ = ["failed", "planner", "write_alone"]


def planner() -> DefaultSavePlanner:
    """Return torch's planner: replicas are divided among the ranks that hold them."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)


def write_alone(tensors: dict[str, torch.Tensor], writer: CheckpointWriter) -> None:
    """Write as one process, without a process group.

    Args:
        tensors: what to write.
        writer: writes it.
    """
    plans = planner()
    plans.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    (plan,), metadata = plans.create_global_plan([plans.create_local_plan()])
    results = writer.write_data(plans.finish_plan(plan), plans).wait()
    writer.finish(metadata, [results])


def failed(target: Path, error: BaseException) -> CheckpointError:
    """Return the error that every rank raises.

    Args:
        target: where the checkpoint should have been.
        error: what went wrong here; torch's says which ranks failed, and why.
    """
    if isinstance(error, CheckpointError):
        return error
    reasons = [str(error)]
    if isinstance(error, CheckpointException):
        reasons = [f"rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items())]
    return CheckpointError(
        f"could not save to {target}: {'; '.join(reasons)}; an older checkpoint at the path is unchanged",
        path=str(target),
    )
