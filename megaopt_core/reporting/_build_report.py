"""Asking an optimizer for its report: every parameter with who steps it, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from attrs import evolve

from megaopt_core.errors import BrokenPluginWarning, PluginError, warn_user
from megaopt_core.plugin_api._observers import ReportLine
from megaopt_core.registry._registry import get_registry
from megaopt_core.reporting._report import OptimizerReport, ParamRow, PartRow
from megaopt_core.sharding._split_step import Travel
from megaopt_core.state._protocol import NamedPieces, StatefulOptimizer

if TYPE_CHECKING:
    from megaopt_core.execution._step_runner import StepRunner
    from megaopt_core.routing._groups import ChildSpec
    from megaopt_core.routing._routing import ParamRoute

__all__ = ["build_report"]


class ReportedPart(NamedPieces, Protocol):
    """One inner optimizer, and how it is stepped."""

    @property
    def runner(self) -> StepRunner:
        """Runs its steps."""


class ReportedOptimizer(StatefulOptimizer, Protocol):
    """The subject of a report; every `MegatronOptimizer` is one."""

    @property
    def parts(self) -> Sequence[ReportedPart]:
        """The inner optimizers."""

    unused_settings: tuple[str, ...]
    """Sentences about settings that change nothing."""

    def step_notes(self) -> Sequence[ReportLine]:
        """Return lines of what watches its steps."""


def _plugin_of(optimizer: str | None) -> str:
    return "-" if optimizer is None else get_registry().owner("optimizer", optimizer).source


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)


def build_report(optimizer: ReportedOptimizer, *, after_step: bool, full: bool = False) -> OptimizerReport:
    """Return the report of an optimizer.

    Args:
        optimizer: a built optimizer.
        after_step: count what the last step changed.
        full: its text has a row for every parameter.
    """
    routes = {} if optimizer.routing is None else optimizer.routing.params
    rows: dict[str, ParamRow] = {}
    parts = []
    position = 0
    for part in optimizer.parts:
        travels = part.sharded.travels()
        registered = strategy = None
        elements = count = 0
        for group in part.groups:
            for param in group["params"]:
                name = optimizer.names[param]
                entry = routes.get(name)
                registered, strategy = (entry.spec.optimizer, entry.strategy) if entry else (None, None)
                rows[name] = _param_row(name, param, entry, part.inner, group, position, travels.get(name))
                elements, count = elements + param.numel(), count + 1
            position += 1
        if registered is None and (child := _child_of_empty(optimizer, position - 1)) is not None:
            registered, strategy = child.optimizer, child.strategy
        for name, note in _notes(registered, part.inner).items():
            if name in rows:
                rows[name] = evolve(rows[name], note=note)
        for name, place in part.runner.places(part).items():
            if name in rows:
                rows[name] = evolve(rows[name], place=place)
        changed = sum(part.changes.changed) if after_step else None
        sent = part.sharded.sent()
        parts.append(
            PartRow(
                registered or "-",
                type(part.inner).__name__,
                _plugin_of(registered),
                count,
                elements,
                changed,
                len(part.stepped),
                part.changes.method,
                _same_as(registered),
                None if sent is None else sent.bytes,
                0 if sent is None else sent.collectives,
                strategy or "",
            )
        )
    ordered = [rows[name] for name in dict.fromkeys((*routes, *rows)) if name in rows]
    readers = () if optimizer.routing is None else optimizer.routing.readers
    # A report is often made on one rank alone: nothing that needs the others is asked.
    problems = optimizer.watched_model.problems(optimizer.names)
    unused = (*optimizer.unused_settings, *_unused_in_parts(optimizer))
    return OptimizerReport(ordered, parts, unused, problems, readers, optimizer.step_notes(), full)


def _unused_in_parts(optimizer: ReportedOptimizer) -> list[str]:
    """Return the settings that the runners of some parts do not act on, or have given up to, and those of others do."""
    told = {sentence.partition("=")[0] for sentence in optimizer.unused_settings}
    found = {
        f"{name}={getattr(part.config, name)!r}: {why}": name
        for part in optimizer.parts
        if part.pieces
        for name, why in part.runner.unused_settings(part).items()
    }
    return sorted(sentence for sentence, name in found.items() if name not in told)


def _same_as(registered: str | None) -> str:
    return "" if registered is None else get_registry().optimizer(registered).same_as or ""


def _notes(registered: str | None, inner: torch.optim.Optimizer) -> Mapping[str, str]:
    """Return what an optimizer's entry says of its parameters."""
    registry = get_registry()
    make = None if registered is None else registry.optimizer(registered).param_notes
    if registered is None or make is None:
        return {}
    try:
        with registry.blaming("optimizer", registered):
            return _require_notes(make(inner))
    except PluginError as error:  # a report without notes is a report still
        warn_user(f"the report has no notes: {error}", BrokenPluginWarning)
        return {}


def _require_notes(notes: object) -> Mapping[str, str]:
    if isinstance(notes, Mapping) and all(isinstance(note, str) for note in notes.values()):
        return notes
    raise PluginError(f"param_notes returned a {type(notes).__name__}; it must map names to notes")


def _child_of_empty(optimizer: ReportedOptimizer, group: int) -> ChildSpec | None:
    children = () if optimizer.routing is None else optimizer.routing.children
    return next((child for child in children if group in child.groups), None)


def _param_row(
    name: str,
    param: torch.Tensor,
    entry: ParamRoute | None,
    inner: torch.optim.Optimizer,
    group: dict[str, Any],
    position: int,
    travel: Travel | None,
) -> ParamRow:
    registered = None if entry is None else entry.spec.optimizer
    view = None if entry is None else entry.decision.view
    return ParamRow(
        name=name,
        shape=tuple(param.shape),
        role="-" if entry is None else entry.decision.role.value,
        view="" if view is None else str(view),
        optimizer=registered or "-",
        optimizer_class=type(inner).__name__,
        plugin=_plugin_of(registered),
        strategy="-" if entry is None else entry.strategy,
        group=position,
        lr=_number(group["lr"]),
        wd=_number(group.get("weight_decay", 0.0)),
        reason="wrapped by hand" if entry is None else entry.reason,
        uncertain=False if entry is None else entry.decision.uncertain,
        travels="" if travel is None else travel.step,
        bytes=0 if travel is None else travel.bytes,
        owner="" if travel is None else travel.owner,
    )
