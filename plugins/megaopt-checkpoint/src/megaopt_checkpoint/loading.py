"""Loading: everything is found, checked and agreed upon before the first tensor is written."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict

from megaopt_checkpoint.given import given_chunks, require_rename, require_sides
from megaopt_checkpoint.model_tensors import (
    collect_model,
    finish_param_sync,
    require_megaopt,
    require_pair,
)
from megaopt_checkpoint.planning import plan_checkpoint
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.sources import FileSource
from megaopt_checkpoint.verify import check_files
from megaopt_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_checkpoint.load_report import LoadReport
    from megaopt_checkpoint.renaming import Rename
    from megaopt_core.optimizers import MegatronOptimizer
    from megaopt_core.routing import NameMap

__all__ = ["load_checkpoint"]

_TRIES = 5
"""How often the ranks may find different checkpoints at a path before it is an error."""


def load_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    verify: bool = True,
    process_group: ProcessGroup | None = None,
    fqn: NameMap | None = None,
) -> LoadReport:
    """Load what :func:`save_checkpoint` saved, at whatever world size, sharding strategy and precision.

    Manifest, names, shapes and checksums are verified first, on all ranks; only then is a tensor written. States
    and step counts come from the checkpoint. A group setting (learning rate, weight decay...) comes from the
    checkpoint too, unless the configuration has changed since: then the configuration's value is kept, and the
    report says so. A scheduler's own rules come last.

    Args:
        path: the checkpoint's folder.
        model: the model or its chunks, wrapped or bare; None: the model is not loaded.
        optimizer: the optimizer; None: it is not loaded.
        scheduler: anything with a `load_state_dict`; its `state_dict` must have been saved.
        strict: names must be the same here and in the checkpoint. False: what fits is loaded, the report says what does
            not. Shapes must be the same in either case.
        rename: `{name in the checkpoint: name here}`, or a function from the one to the other.
        verify: check the checksums of all files; the work is divided among the ranks.
        process_group: who loads together; None: everybody.
        fqn: maps `(chunk index, local name)` to a globally unique name; the same as for `save_checkpoint`.

    Returns:
        What was loaded and what was not.

    Raises:
        CheckpointMismatchError: the checkpoint does not fit.
        CheckpointCorruptError: a file is missing, too short or damaged.
        CheckpointVersionError: it has another format than the one that is read.
        CheckpointError: there is no checkpoint, or it cannot be read. In each case nothing has been changed, unless
            files changed while they were read, after their checksums had been right: then the error says that model
            and optimizer are partly loaded.

    Example:
        >>> import tempfile, torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_checkpoint import load_checkpoint, save_checkpoint
        >>> def make(name):
        ...     model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2, bias=False)})
        ...     return model, build_optimizer(model, "adam", lr=1e-3)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/last", *make("old"))
        ...     print(load_checkpoint(f"{folder}/last", *make("new"), rename={"old.weight": "new.weight"}))
        loaded the state of 1 parameters
        renamed: old.weight -> new.weight
    """
    require_megaopt(optimizer)
    model = given_chunks(model)
    require_sides(scheduler, process_group, fqn, method="load_state_dict")
    require_rename(rename)
    ranks = Ranks(process_group)
    with _open(path, ranks, verify) as source:
        finish_param_sync(model)
        ranks.agree(lambda: require_pair(model, optimizer))
        tensors = None if model is None else ranks.agree(lambda: collect_model(model, optimizer, fqn))
        plan, report = plan_checkpoint(
            source, tensors, optimizer, scheduler, strict=strict, rename=rename, ranks=ranks
        )
        if verify:
            ranks.agree(
                lambda: check_files(source.folder, source.manifest, part=ranks.rank, parts=ranks.size)
            )
        plan.apply(ranks)
    return report


def _open(path: str | os.PathLike[str], ranks: Ranks, verify: bool) -> FileSource:
    """Open one checkpoint on all ranks: a collective."""
    tries = 0
    while True:
        tries += 1
        source = ranks.agree(lambda: FileSource.open(path, verify=verify))
        digest = hashlib.sha256(json.dumps(asdict(source.manifest), sort_keys=True).encode()).hexdigest()
        if len(set(ranks.gather(digest))) == 1:
            return source
        source.folder.close()  # another run has put a new one in place between the first rank and the last
        if tries == _TRIES:
            raise CheckpointError(
                f"the ranks see different checkpoints at {source.name}: it must be on a file system that all "
                "ranks share, and no process may save to it during the load",
                path=source.name,
            )
