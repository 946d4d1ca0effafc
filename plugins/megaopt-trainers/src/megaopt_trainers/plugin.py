"""The plugin: process groups of models whose trainer keeps them, and names of trainers' settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megaopt_core import ProcessGroupCollection, hookimpl

__all__ = ["megaopt_advice", "megaopt_api", "megaopt_process_groups"]

megaopt_api = "1"


@hookimpl
def megaopt_advice(name: str, kind: str) -> str | None:
    """Say what a setting of a trainer's is called here, or where it is set.

    Args:
        name: what was given.
        kind: what it was given as.
    """
    from megaopt_trainers._advice import MEGATRON

    return f"; {MEGATRON[name]}" if kind == "setting" and name in MEGATRON else None


@hookimpl
def megaopt_process_groups(model_chunks: Sequence[torch.nn.Module]) -> ProcessGroupCollection | None:
    """Return the process groups that Megatron-core keeps for a model of its own; None for any other model.

    Args:
        model_chunks: the model chunks, wrapped or bare.
    """
    # A model of Megatron's cannot exist before its package is imported; here nothing is.
    if "megatron.core.parallel_state" not in sys.modules:
        return None
    from megaopt_trainers._megatron_groups import groups_of_megatron

    return groups_of_megatron(model_chunks)
