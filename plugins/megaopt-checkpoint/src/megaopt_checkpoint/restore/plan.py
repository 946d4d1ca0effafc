"""What a load of an optimizer will do, found out before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import define, field

from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.configured import merge_configured
from megaopt_checkpoint.restore.fitting import require_tensors
from megaopt_checkpoint.restore.matching import LoadedBeside, Matching, match
from megaopt_checkpoint.restore.piece import Member, PieceRestore
from megaopt_checkpoint.restore.source import Request, Source, read_values
from megaopt_core.errors import CheckpointError
from megaopt_core.params import Shard
from megaopt_core.plugin_api import Change
from megaopt_core.precision import MAIN_PARAM
from megaopt_core.state import (
    GroupMerge,
    load_or_restore,
    mismatch,
    named_errors,
    piece_states,
    require_settings,
)

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["LoadPlan", "Restore", "plan_load"]


class Restore(Protocol):
    """Something else that a load writes: a model, a scheduler."""

    def write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Write what may be refused by whoever gets it, before any value is written.

        Args:
            undo: receives what takes back each thing that was written.
        """

    def write(self) -> None:
        """Write values; before those of the optimizer."""


@define
class LoadPlan:
    """Everything that a load will write.

    Args:
        source: what is loaded.
        found: which name is which.
        optimizer: the optimizer, if it is loaded.
        requests: `(key, place)` of what is read of the state of this rank's pieces.
        finals: what is done then, in order.
        groups: group settings.
        kept: `"group 0: lr"` to `(configured, in the checkpoint)` where the configuration's value is kept.
        scaler: the loss scaler's state.
        others: what else is written.
    """

    source: Source
    found: Matching
    optimizer: MegatronOptimizer | None = None
    requests: list[Request] = field(factory=list)
    finals: list[Callable[[], None]] = field(factory=list)
    groups: GroupMerge = field(factory=GroupMerge)
    kept: dict[str, tuple[Any, Any]] = field(factory=dict)
    scaler: Any = None
    others: list[Restore] = field(factory=list)

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
        self.groups.warn()

    def _write_settings(self, undo: list[Callable[[], None]]) -> None:
        """Write what is not read from files, and may be refused by whoever gets it."""
        if self.optimizer is not None and self.groups.changes:
            self.groups.write(self.optimizer, undo)
        scaler = None if self.optimizer is None else self.optimizer.grad_scaler
        if self.scaler is not None and scaler is not None:
            with named_errors(self.source.name, "the loss scaler does not take its state"):
                undo.append(load_or_restore(scaler.load_state_dict, self.scaler, scaler.state_dict()))
        for other in self.others:
            other.write_settings(undo)

    def _write(self) -> None:
        try:
            # The model may have been loaded by somebody else. Afterwards main values of the file hold, also where the
            # model's dtype is another.
            loaded = nullcontext() if self.optimizer is None else self.optimizer.changing(Change.LOADED)
            with torch.no_grad(), loaded:
                for other in self.others:
                    other.write()
                self.source.read(self.requests)
                for final in self.finals:
                    final()
        except (OSError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self.source.name} could not be read to its end, although it was in order a moment before: {error}. "
                "Model and optimizer are partly loaded: load again before you go on",
                path=self.source.name,
            ) from error


def plan_load(
    source: Source,
    optimizer: MegatronOptimizer | None,
    *,
    strict: bool,
    ranks: Ranks,
    beside: LoadedBeside | None = None,
) -> LoadPlan:
    """Find out what a load will do: a collective; nothing is changed.

    Args:
        source: what is loaded.
        optimizer: the optimizer, or None.
        strict: names must be the same on both sides.
        ranks: who loads.
        beside: what is loaded together with the optimizer.

    Raises:
        CheckpointError: it does not fit.
    """
    plan = _planned(source, optimizer, beside or LoadedBeside(), strict, ranks)
    if any(ranks.gather(bool(plan.found.frozen))):  # they join when all else is known to fit
        ranks.agree(lambda: _keep_frozen(plan.found, optimizer))
        plan = _planned(source, optimizer, beside or LoadedBeside(), strict, ranks)
    return plan


def _planned(
    source: Source, optimizer: MegatronOptimizer | None, beside: LoadedBeside, strict: bool, ranks: Ranks
) -> LoadPlan:
    """Return what a load of parameters that are stepped here will write: a collective; nothing is changed."""
    found = match(source, optimizer, beside, strict=strict, ranks=ranks)
    plan = LoadPlan(source, found, optimizer)

    def fill() -> list[str]:
        with named_errors(source.name, "it cannot be planned"):
            return [] if optimizer is None else _plan_optimizer(plan, found, optimizer)

    absent = ranks.agree(fill)
    missing = sorted({entry for of_rank in ranks.gather(absent) for entry in of_rank})
    if missing and strict:
        raise mismatch(
            source.name,
            f"lacks state that the optimizer keeps here: {'; '.join(missing[:5])}; strict=False lets it start anew",
            [entry.partition(":")[0] for entry in missing],
        )
    for entry in missing:
        name, _, key = entry.partition(": ")
        found.reset[name] = f"the checkpoint has no {key!r}"
    return plan


def _keep_frozen(found: Matching, optimizer: Any) -> None:
    """Take in the parameters that are frozen here and have a state there, in groups as there: it is kept for them.

    Args:
        found: what fits a checkpoint.
        optimizer: takes them in.

    Raises:
        CheckpointMismatchError: their state cannot be read.
    """
    parameters = found.source.manifest.parameters
    for names in found.frozen.values():
        for record in (record for there in names.values() for record in parameters[there]["state"].values()):
            if "tensor" in record:
                found.source.stored(record["tensor"])
    here = {parameters[there]["group"] for there in found.state.values()}
    for group, names in found.frozen.items():
        optimizer.late.keep([*names], apart=group not in here)


def _plan_optimizer(plan: LoadPlan, found: Matching, optimizer: MegatronOptimizer) -> list[str]:
    """Plan everything of an optimizer, and return `"name: key"` of state that is here but not in the checkpoint."""
    missing: list[str] = []
    records = {name: found.record(name) for name in found.same}
    for piece in piece_states(optimizer):
        members = [_member(found, records, offset, shard) for offset, shard in piece.members]
        PieceRestore(piece, members, plan.source, plan.requests, plan.finals, missing).plan()
    require_tensors(plan.source, plan.requests)
    described = plan.source.manifest.optimizer or {}
    plan.scaler = read_values(plan.source, described.get("scaler"))
    groups = [
        (read_values(plan.source, group["settings"]), read_values(plan.source, group["configured"]))
        for group in described.get("groups", ())
    ]
    group_of = {name: record.get("group") for name, record in records.items()}
    plan.groups, plan.kept = merge_configured(optimizer, group_of, groups)
    require_settings(plan.source.name, optimizer, plan.groups)
    return missing


def _member(found: Matching, records: Mapping[str, Mapping[str, Any]], offset: int, shard: Shard) -> Member:
    record = records.get(shard.name, {"state": {}})
    kept = {key: value for key, value in record["state"].items() if key != MAIN_PARAM}
    return Member(offset, shard, kept, found.main_key(shard.name), "fresh" in record)
