"""The map of `{parameter name: group id}` as a torch.distributed.checkpoint of its own."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from megaopt_checkpoint.ranks import Ranks
from megaopt_core.errors import ConfigurationError

if TYPE_CHECKING:
    from megaopt_core.routing import Routing

__all__ = ["dump_group_map"]


def dump_group_map(routing: Routing, path: str | os.PathLike[str]) -> None:
    """Write `{parameter name: group id}` of all ranks with torch.distributed.checkpoint: a collective.

    Each name is a key, each id a tensor of one integer, so that `dcp.load` reads them back without unpickling a value.

    Args:
        routing: whose groups.
        path: the folder.

    Raises:
        ConfigurationError: it cannot be written to.

    Example:
        >>> import tempfile, torch, warnings
        >>> import torch.distributed.checkpoint as dcp
        >>> from megaopt_core import OptimizerConfig, route
        >>> routing = route(OptimizerConfig(optimizer="adam", lr=1e-3), torch.nn.Linear(2, 2))
        >>> groups = {"weight": torch.tensor(-1), "bias": torch.tensor(-1)}
        >>> with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch remarks that there is one process only
        ...     dump_group_map(routing, folder)
        ...     dcp.load(groups, checkpoint_id=folder, no_dist=True)
        >>> {name: int(group) for name, group in groups.items()}
        {'weight': 0, 'bias': 1}
    """
    ranks = Ranks()
    groups: dict[str, int] = {}
    for of_rank in ranks.gather({name: entry.spec.group for name, entry in routing.params.items()}):
        groups.update(of_rank)
    tensors = {name: torch.tensor(group) for name, group in groups.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            save(tensors, checkpoint_id=os.fspath(path))
        except (CheckpointException, OSError, ValueError) as error:
            name = "dump_param_to_param_group_map"
            reason = str(error).strip().splitlines()[-1]  # torch's ends with that of the first rank
            raise ConfigurationError.of(name, path, f"cannot be written to ({reason})") from error
