"""What a load will do, found out before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import CheckpointError, CheckpointMismatchError
from megaopt_core.precision._policy import LOW_PRECISION
from megaopt_core.state._pieces import PieceState, piece_states
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._restore.fitting import (
    load_or_restore,
    named_errors,
    require_numbers,
    require_settings,
    require_tensors,
)
from megaopt_core.state._restore.group_settings import GroupMerge, merge_groups
from megaopt_core.state._restore.load_report import LoadReport
from megaopt_core.state._restore.matching import Matching, match
from megaopt_core.state._restore.piece import MAIN_PARAM, Member, PieceRestore
from megaopt_core.state._restore.renaming import Rename
from megaopt_core.state._sources import Request, Source, read_values

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = ["LoadPlan", "plan_load", "plan_optimizer"]


@define
class LoadPlan:
    """Everything that a load will write.

    Args:
        source: what is loaded.
        report: what the caller is told.
        optimizer: the optimizer, if it is loaded.
        model_requests: `(key, place)` of the model's tensors.
        pieces: the state of this rank's pieces.
        groups: group settings.
        scaler: the loss scaler's state.
        scheduler: the scheduler and its state.
        objects: modules and their extra state.
    """

    source: Source
    report: LoadReport
    optimizer: NamedState | None = None
    model_requests: list[Request] = field(factory=list)
    pieces: list[PieceRestore] = field(factory=list)
    groups: GroupMerge = field(factory=GroupMerge)
    scaler: Any = None
    scheduler: tuple[Any, Any] | None = None
    objects: list[tuple[torch.nn.Module, Any]] = field(factory=list)

    def apply(self, ranks: Ranks) -> None:
        """Write everything; whatever can refuse goes first.

        Args:
            ranks: who loads.
        """
        undo: list[Callable[[], None]] = []
        try:
            ranks.agree(lambda: self._write_settings(undo))
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        ranks.agree(self._write)

    def _write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Write what is not read from files, and may be refused by whoever gets it."""
        if self.optimizer is not None and self.groups.changes:
            undo.append(self.groups.apply(self.optimizer))
        scaler = None if self.optimizer is None else self.optimizer.grad_scaler
        if self.scaler is not None and scaler is not None:
            with named_errors(self.source, "the loss scaler does not take its state"):
                undo.append(load_or_restore(scaler.load_state_dict, self.scaler, scaler.state_dict()))
        for module, value in self.objects:
            with named_errors(self.source, f"{type(module).__name__} does not take its extra state"):
                undo.append(load_or_restore(module.set_extra_state, value, module.get_extra_state()))
        if self.scheduler is not None:
            scheduler, state = self.scheduler
            before = dict(vars(scheduler))
            undo.append(lambda: vars(scheduler).update(before))
            with named_errors(self.source, "the scheduler does not take its state"):
                scheduler.load_state_dict(state)

    def _write(self) -> None:
        try:
            self._write_values()
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.source.name} could not be read to its end, although it was in order a moment before: {error}. "
                "Model and optimizer are partly loaded: load again before you go on",
                path=self.source.name,
            ) from error

    def _write_values(self) -> None:
        with torch.no_grad():
            self.source.read(self.model_requests)
            if self.optimizer is not None and self.model_requests:
                for part in self.optimizer.parts:
                    part.sharded.take_model_values()
            self.source.read([request for piece in self.pieces for request in piece.requests])
            for piece in self.pieces:
                for final in piece.finals:
                    final()
            for part in self.optimizer.parts if self.optimizer is not None else ():
                part.writes.record()  # what the file says of main values holds, also where the model's dtype is another


def plan_load(
    source: Source,
    model: Mapping[str, torch.Tensor] | None,
    optimizer: NamedState | None,
    scheduler: Any,
    *,
    strict: bool,
    rename: Rename | None,
    ranks: Ranks,
    extra_state: Mapping[str, torch.nn.Module] = MappingProxyType({}),
) -> LoadPlan:
    """Find out what a load will do: a collective; nothing is changed.

    Args:
        source: what is loaded.
        model: the model's tensors by canonical name, or the parts of them that are here; None: it is not loaded.
        optimizer: the optimizer, or None.
        scheduler: the scheduler, or None.
        strict: names must be the same on both sides.
        rename: names in the checkpoint to names here.
        ranks: who loads.
        extra_state: name of a module's extra state to the module.

    Raises:
        CheckpointError: it does not fit.
    """
    found = match(source, model, optimizer, strict=strict, rename=rename, ranks=ranks)
    plan = LoadPlan(source, found.report, optimizer)

    def fill() -> list[str]:
        with named_errors(source, "it cannot be planned"):
            _plan_model(plan, found, model or {}, extra_state)
            require_tensors(source, plan.model_requests)
            if optimizer is not None and source.manifest.optimizer is not None:
                plan_optimizer(plan, found, optimizer)
            if scheduler is not None:
                _plan_scheduler(plan, scheduler)
            plan.report.extra = read_values(source, source.manifest.extra)
        return [entry for piece in plan.pieces for entry in piece.missing]

    absent = ranks.agree(fill)
    missing = sorted({entry for of_rank in ranks.gather(absent) for entry in of_rank})
    if missing and strict:
        raise CheckpointMismatchError(
            f"{source.name} lacks state that the optimizer keeps here: {'; '.join(missing[:5])}; strict=False lets "
            "it start anew",
            path=source.name,
            names=[entry.partition(":")[0] for entry in missing],
        )
    for entry in missing:
        name, _, key = entry.partition(": ")
        found.report.reset[name] = f"the checkpoint has no {key!r}"
    found.report.settings.update(plan.groups.kept)
    return plan


def _plan_model(
    plan: LoadPlan,
    found: Matching,
    tensors: Mapping[str, torch.Tensor],
    extra_state: Mapping[str, torch.nn.Module],
) -> None:
    manifest = plan.source.manifest
    for name, place in tensors.items():
        stored = found.model.get(name)
        if stored is None:
            continue
        key = manifest.model["tensors"][stored]
        main = found.main_key(name)
        # A parameter that is fp32 here and was not there is best read from its fp32 main parameter.
        if main is not None and place.dtype == torch.float32 and plan.source.stored(key).dtype in _LOW_NAMES:
            key = main
            found.report.converted[name] = (
                f"{plan.source.stored(manifest.model['tensors'][stored]).dtype} -> float32"
            )
        elif plan.source.stored(key).dtype != str(place.dtype).removeprefix("torch."):
            found.report.converted[name] = (
                f"{plan.source.stored(key).dtype} -> {str(place.dtype).removeprefix('torch.')}"
            )
        plan.model_requests.append((key, place))
    for name, module in extra_state.items():
        objects = manifest.model.get("objects", {})
        stored = found.names.find(name, objects)
        if stored is not None:
            plan.objects.append((module, read_values(plan.source, objects[stored])))


_LOW_NAMES = tuple(str(dtype).removeprefix("torch.") for dtype in LOW_PRECISION)


def plan_optimizer(plan: LoadPlan, found: Matching, optimizer: NamedState) -> None:
    """Find out what will be written into an optimizer; nothing is changed.

    Args:
        plan: receives it.
        found: which name is which.
        optimizer: the optimizer.
    """
    for piece in piece_states(optimizer):
        restore = PieceRestore(piece, _members(plan.source, found, piece), plan.source)
        restore.plan()
        plan.pieces.append(restore)
        require_tensors(plan.source, restore.requests)
    require_numbers(plan.source, plan.pieces)
    described = plan.source.manifest.optimizer or {}
    plan.scaler = read_values(plan.source, described.get("scaler"))
    plan.groups = merge_groups(
        optimizer,
        {name: found.record(name) for name in found.same},
        described.get("groups", ()),
        lambda key: read_values(plan.source, {"$tensor": key}),
    )
    require_settings(plan.source, optimizer, plan.groups)


def _members(source: Source, found: Matching, piece: PieceState) -> list[Member]:
    members = []
    for offset, shard in piece.members:
        record = found.record(shard.name) if shard.name in found.same else {"state": {}}
        state, is_fresh = record["state"], "fresh" in record
        main = found.main_key(shard.name)
        if main is None and shard.name in found.model:
            main = source.manifest.model["tensors"][found.model[shard.name]]
        kept = {key: value for key, value in state.items() if key != MAIN_PARAM}
        members.append(Member(offset, shard, kept, main, is_fresh))
    return members


def _plan_scheduler(plan: LoadPlan, scheduler: Any) -> None:
    if plan.source.manifest.scheduler is None:
        raise CheckpointMismatchError(
            f"{plan.source.name} was saved without a scheduler; load it with scheduler=None",
            path=plan.source.name,
        )
    plan.scheduler = scheduler, read_values(plan.source, plan.source.manifest.scheduler)
