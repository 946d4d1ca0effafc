"""Comparing what is here with what a checkpoint has, by name, over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.registry._registry import get_registry
from megaopt_core.state._document import optimizer_names
from megaopt_core.state._pieces import piece_states
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._restore.load_report import LoadReport
from megaopt_core.state._restore.renaming import NameTable, Rename
from megaopt_core.state._shown import shown
from megaopt_core.state._sources import Source

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = ["Matching", "match"]


@define
class Matching:
    """Which name here is which name there.

    Args:
        source: the checkpoint.
        names: names here to names there.
        report: what did not match.
        model: model tensor here to its name there.
        state: parameter here to its name there.
        same: parameters here whose optimizer is the one that saved their state.
    """

    source: Source
    names: NameTable
    report: LoadReport
    model: dict[str, str] = field(factory=dict)
    state: dict[str, str] = field(factory=dict)
    same: list[str] = field(factory=list)

    def record(self, name: str) -> Mapping[str, Any]:
        """Return what the checkpoint has of a parameter.

        Args:
            name: name here.
        """
        found: Mapping[str, Any] = self.source.manifest.parameters[self.state[name]]
        return found

    def main_key(self, name: str) -> str | None:
        """Return the key of a parameter's main copy in the checkpoint, None when there is none.

        Args:
            name: name here.
        """
        stored = self.names.find(name, self.source.manifest.parameters)
        if stored is None:
            return None
        key: str | None = self.source.manifest.parameters[stored]["state"].get("main_param", {}).get("tensor")
        return key


def match(
    source: Source,
    model: Mapping[str, torch.Tensor] | None,
    optimizer: NamedState | None,
    *,
    strict: bool,
    rename: Rename | None,
    ranks: Ranks,
) -> Matching:
    """Compare names, shapes and optimizers: a collective; nothing is changed.

    Args:
        source: the checkpoint.
        model: the model's tensors by name; None: it is not loaded.
        optimizer: the optimizer, or None.
        strict: names must be the same on both sides.
        rename: names in the checkpoint to names here.
        ranks: who loads.

    Raises:
        CheckpointMismatchError: something does not fit.
    """
    manifest = source.manifest
    stored_model: Mapping[str, str] = manifest.model.get("tensors", {})
    aliases, objects = manifest.model.get("aliases", {}), manifest.model.get("objects", {})
    names = ranks.agree(
        lambda: NameTable.of([*stored_model, *manifest.parameters, *objects], aliases, rename)
    )
    report = LoadReport(world_size=manifest.world_size, configuration=manifest.configuration)
    found = Matching(source, names, report)
    for name in model or ():
        stored = names.find(name, stored_model)
        if stored is not None:
            found.model[name] = stored
    steps = {} if optimizer is None else optimizer_names(optimizer)
    for name in [] if optimizer is None else optimizer.names.values():
        stored = names.find(name, manifest.parameters)
        if stored is not None:
            found.state[name] = stored
    ranks.agree(lambda: _check_shapes(found, model or {}, optimizer))
    here_model = set().union(*ranks.gather(set(model))) if model is not None else set()
    here_state = set().union(
        *ranks.gather(set(steps) & set(optimizer.names.values()) if optimizer else set())
    )
    if optimizer is not None and manifest.optimizer is None:
        raise CheckpointMismatchError(
            f"{source.name} was saved without an optimizer; load it with optimizer=None", path=source.name
        )
    if model is not None and not stored_model:
        raise CheckpointMismatchError(
            f"{source.name} was saved without a model; load it with model=None", path=source.name
        )
    report.missing = _missing(names, here_model, stored_model) + _missing(
        names, here_state, manifest.parameters, " (state)"
    )
    used_model = {names.find(name, stored_model) for name in here_model}
    used_state = {names.find(name, manifest.parameters) for name in here_state}
    if model is not None:
        report.unexpected += tuple(sorted(set(stored_model) - used_model))
    if optimizer is not None:
        report.unexpected += tuple(
            f"{name} (state)" for name in sorted(set(manifest.parameters) - used_state)
        )
    report.renamed = {here: old for here, old in names.renamed().items() if here in here_model | here_state}
    _require_names(source, report, strict)
    readers = () if optimizer is None or optimizer.routing is None else optimizer.routing.readers
    ranks.agree(lambda: _compare_optimizers(found, steps, ", ".join(readers), strict))
    merged: dict[str, str] = {}
    for of_rank in ranks.gather(report.reset):
        merged.update(of_rank)
    report.reset = dict(sorted(merged.items()))
    report.loaded = tuple(sorted(set().union(*ranks.gather(set(found.same)))))
    return found


def _missing(
    names: NameTable, here: Iterable[str], stored: Mapping[str, Any], what: str = ""
) -> tuple[str, ...]:
    return tuple(f"{name}{what}" for name in sorted(here) if names.find(name, stored) is None)


def _require_names(source: Source, report: LoadReport, strict: bool) -> None:
    if not strict or not (report.missing or report.unexpected):
        return
    parts = []
    if report.missing:
        parts.append(f"it lacks {shown(report.missing)}")
    if report.unexpected:
        parts.append(f"it has {shown(report.unexpected)}, which is not here")
    raise CheckpointMismatchError(
        f"{source.name} does not fit: {'; '.join(parts)}. strict=False loads what fits, and rename= of "
        "load_checkpoint maps old names to new ones",
        path=source.name,
        names=[name.removesuffix(" (state)") for name in (*report.missing, *report.unexpected)],
    )


def _check_shapes(found: Matching, tensors: Mapping[str, torch.Tensor], optimizer: NamedState | None) -> None:
    wrong = {}
    stored_model = found.source.manifest.model.get("tensors", {})
    for name, stored in found.model.items():
        there, here = found.source.stored(stored_model[stored]).shape, tuple(tensors[name].shape)
        if there != here:
            wrong[name] = there, here
    if optimizer is not None:
        for piece in piece_states(optimizer):
            for _, shard in piece.members:
                if shard.name in found.state:
                    there = tuple(found.record(shard.name)["shape"])
                    if there != shard.shape:
                        wrong[shard.name] = there, shard.shape
    if wrong:
        described = [
            f"{name} has shape {there} there and {here} here" for name, (there, here) in wrong.items()
        ]
        raise CheckpointMismatchError(
            f"{found.source.name} does not fit: {shown(described)}", path=found.source.name, names=list(wrong)
        )


def _compare_optimizers(found: Matching, steps: Mapping[str, str], readers: str, strict: bool) -> None:
    plugins = found.source.manifest.plugins
    registry = get_registry()
    there = found.source.manifest.written.get("roles", "")
    otherwise = (
        ""
        if there == readers
        else f" (roles read by {there or 'nobody'} there, by {readers or 'nobody'} here)"
    )
    for name in found.state:
        saved = found.record(name)["optimizer"]
        if saved in {steps.get(name), None}:
            found.same.append(name)
            continue
        distribution = plugins.get(saved)
        if distribution and not registry.has_optimizer(saved):
            absent = f"{saved!r} of {distribution}, which is not installed here (pip install {distribution})"
            if strict:
                raise CheckpointMismatchError(
                    f"{found.source.name}: the state of {name!r} was made by {absent}; strict=False lets it start anew",
                    path=found.source.name,
                    names=[name],
                )
            found.report.reset[name] = f"it was stepped by {absent}"
        else:
            found.report.reset[name] = f"it was stepped by {saved!r}, here by {steps.get(name)!r}{otherwise}"
    if strict and found.report.reset:
        described = [f"{name!r}: {why.removesuffix(otherwise)}" for name, why in found.report.reset.items()]
        raise CheckpointMismatchError(
            f"{found.source.name} routes {len(described)} parameters otherwise{otherwise}: {shown(described)}. Build "
            "the optimizer with the same configuration and overrides, or with the checkpoint's routing "
            "(build_optimizer(..., routing=path)), or let their state start anew: strict=False",
            path=found.source.name,
            names=list(found.report.reset),
        )
