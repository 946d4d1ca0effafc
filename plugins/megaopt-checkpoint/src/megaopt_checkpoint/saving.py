"""Saving: every rank writes what it alone holds, and the new checkpoint takes its place in one move."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from attrs import define
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from megaopt_checkpoint.background import PendingSave, background_of, in_thread
from megaopt_checkpoint.collected import collect_state
from megaopt_checkpoint.document import describe_optimizer, require_own_names, versions
from megaopt_checkpoint.folder import folder_path
from megaopt_checkpoint.given import given_chunks, require_sides
from megaopt_checkpoint.held import require_coverage
from megaopt_checkpoint.model_tensors import (
    collect_model,
    finish_param_sync,
    require_megaopt,
    require_pair,
)
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.retention import Removal, require_numbered
from megaopt_checkpoint.staging import Staging, begin, staging_folder
from megaopt_checkpoint.stored import Manifest
from megaopt_checkpoint.values.encoding import encode
from megaopt_checkpoint.writer import CheckpointWriter
from megaopt_checkpoint.writing import failed, planner, write_alone
from megaopt_core.state import optimizer_names, plugins_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.optimizers import MegatronOptimizer
    from megaopt_core.routing import NameMap

__all__ = ["save_checkpoint"]


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    async_save: Literal[False] = False,
    process_group: ProcessGroup | None = None,
    fqn: NameMap | None = None,
) -> None: ...


@overload
def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    async_save: Literal[True],
    process_group: ProcessGroup | None = None,
    fqn: NameMap | None = None,
) -> PendingSave: ...


def save_checkpoint(
    path: str | os.PathLike[str],
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any = None,
    extra: Any = None,
    *,
    keep_last: int | None = None,
    async_save: bool = False,
    process_group: ProcessGroup | None = None,
    fqn: NameMap | None = None,
) -> PendingSave | None:
    """Save everything that a run needs to go on, as a folder that any world size and sharding strategy can load.

    With torch.distributed initialised it is a collective: every rank writes one file with what it alone holds,
    replicas share the work, nothing is gathered. The checkpoint grows in a hidden folder beside `path` and takes its
    place in one rename after everything is on the disk: whatever kills the run, `path` is the old checkpoint or the
    new one.

    Args:
        path: the folder; its file system is shared by all ranks. An older checkpoint there is replaced.
        model: the model or its chunks, wrapped or bare; None: no model.
        optimizer: what `get_megatron_optimizer` or `build_optimizer` returned; None: no optimizer.
        scheduler: anything with a `state_dict` of plain values.
        extra: plain values and tensors of your own: step, data position, random states. The first rank's are saved.
        keep_last: `path` ends with a number; remove the oldest checkpoints of its series until so many are left.
        async_save: copy the state and return; write while training goes on.
        process_group: who saves together; None: everybody.
        fqn: maps `(chunk index, local name)` to a globally unique name, where pipeline ranks number locally; the same
            as for `get_megatron_optimizer`.

    Returns:
        None; with `async_save`, a :class:`PendingSave` whose `result()` waits.

    Raises:
        CheckpointError: it cannot be saved, with the same words on every rank, or it was called inside a step, as by
            a signal handler; an older checkpoint is still there.
        CheckpointBusyError: somebody is saving to this path.
        MegaoptError: a step observer refuses the save, on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_checkpoint import load_checkpoint, save_checkpoint
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = build_optimizer(model, "adam", lr=1e-3)
        >>> save_checkpoint(f"{folder.name}/step-100", model, optimizer, extra={"step": 100}, keep_last=3)
        >>> load_checkpoint(f"{folder.name}/step-100", model, optimizer).extra
        {'step': 100}
        >>> folder.cleanup()
    """
    target = folder_path(path)
    require_megaopt(optimizer)
    model = given_chunks(model)
    require_sides(scheduler, process_group, fqn, method="state_dict")
    ranks = Ranks(process_group)
    require_numbered(target, keep_last)
    begun: list[Staging] = []
    with nullcontext() if optimizer is None else optimizer.step_lock.saving(), ExitStack() as held:
        if optimizer is not None:
            optimizer.before_save()
        finish_param_sync(model)
        tensors, manifest = _collect(model, optimizer, scheduler, extra, ranks, fqn)
        ranks.first(lambda: begun.append(begin(target, held)))
        removal = Removal(target, keep_last)

        def finish() -> None:
            begun[0].commit()
            removal.run()

        writer = CheckpointWriter(staging_folder(target), ranks.rank, manifest, finish)
        save = _Save(target, tensors, writer, ranks, removal)
        if async_save:
            return save.run_in_background(held)
        save.run()
        held.close()  # in here, where an interrupt still finds its way to it
    removal.warn()
    return None


def _collect(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None,
    optimizer: MegatronOptimizer | None,
    scheduler: Any,
    extra: Any,
    ranks: Ranks,
    fqn: NameMap | None,
) -> tuple[dict[str, torch.Tensor], Manifest]:
    tensors: dict[str, torch.Tensor] = {}
    manifest = Manifest(world_size=ranks.size, written=versions(optimizer))

    def collect() -> Any:
        require_pair(model, optimizer)
        manifest.model = collect_model(model, optimizer, fqn).describe(tensors)
        manifest.scheduler = (
            None if scheduler is None else encode(scheduler.state_dict(), tensors, "scheduler")
        )
        manifest.extra = None if ranks.rank else encode(extra, tensors, "extra")
        return None if optimizer is None else collect_state(optimizer)

    collected = ranks.agree(collect)
    keys = manifest.model.get("tensors", {})
    require_own_names(optimizer, {name: tensors[key] for name, key in keys.items()}, ranks)
    require_coverage(optimizer, {key: tensors[key] for key in keys.values()}, ranks)
    for part in ranks.gather_different(manifest.model):
        for kind, values in part.items():
            manifest.model[kind] = {**values, **manifest.model[kind]}
    if optimizer is not None:
        tensors.update(collected.tensors)
        manifest.optimizer = describe_optimizer(optimizer, collected, tensors, ranks)
        manifest.configuration = optimizer.config.to_dict()
        manifest.plugins = plugins_of(optimizer_names(optimizer).values())
    return tensors, manifest


@define(eq=False)
class _Save:
    """One save, after everything that is saved has been found."""

    target: Path
    tensors: dict[str, torch.Tensor]
    writer: CheckpointWriter
    ranks: Ranks
    removal: Removal

    def run(self) -> None:
        """Write and put in place."""
        try:
            if self.ranks.size == 1:
                write_alone(self.tensors, self.writer)
            else:
                self._write(self.tensors, self.ranks.group)
        except (CheckpointException, OSError, RuntimeError) as error:
            raise failed(self.target, error) from error

    def _write(self, tensors: dict[str, torch.Tensor], group: ProcessGroup | None) -> None:
        dcp_save(tensors, storage_writer=self.writer, planner=planner(), process_group=group)

    def run_in_background(self, held: ExitStack) -> PendingSave:
        """Copy the state and begin to write it; who writes takes over what is held."""
        writing: Future[Any] | None = None
        try:
            background = background_of(self.ranks) if self.ranks.size > 1 else None
            staged = {key: _copy(tensor) for key, tensor in self.tensors.items()}
            if background is None:
                writing = in_thread(lambda: write_alone(staged, self.writer))
            else:
                writing = background.submit(lambda: self._write(staged, background.group))
            return PendingSave.of(
                self.target,
                writing,
                held.pop_all().close,
                lambda error: failed(self.target, error),
                self.removal.warn,
            )
        except BaseException:
            if writing is not None:
                end = held.pop_all()
                writing.add_done_callback(lambda _: end.close())
            raise


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copied = getattr(tensor, "copied", None)
    if copied is not None:
        made: torch.Tensor = copied()
        return made
    return tensor.detach().to("cpu", copy=True)
