"""Saving with some ranks and loading with others, by torch.distributed.checkpoint, without any plugin."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load  # noqa: TID251 - as a user does,
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save  # noqa: TID251 - without any plugin

from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["load", "save"]


def save(folder: str, model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
    """Save model and optimizer; every rank calls it.

    Args:
        folder: where to.
        model: the model.
        optimizer: its optimizer.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch remarks on its own interfaces
        dcp_save({"model": model.state_dict(), "optim": optimizer.checkpoint_state()}, checkpoint_id=folder)


def load(folder: str, model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
    """Load what :func:`save` saved; every rank calls it.

    Args:
        folder: where from.
        model: the model.
        optimizer: its optimizer.
    """
    held: Mapping[str, Any] = {"model": model.state_dict(), "optim": optimizer.checkpoint_state()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(dict(held), checkpoint_id=folder)
    model.load_state_dict(held["model"])
    optimizer.reload_model_params()
