"""Comparing what an optimizer has here with what a checkpoint has, by name, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from megaopt_core.errors import CheckpointMismatchError
from megaopt_core.params._names import shown
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.registry._missing import absent_plugin
from megaopt_core.registry._registry import get_registry
from megaopt_core.state._document import (
    described_view,
    optimizer_names,
    plugins_of,
    readers_of,
    stored_view,
    views_of,
)
from megaopt_core.state._pieces import piece_states
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._restore.fitting import mismatch, require_same_shapes
from megaopt_core.state._sources import Source

if TYPE_CHECKING:
    from megaopt_core.params._views import MatrixView
    from megaopt_core.state._protocol import NamedState

__all__ = ["LoadedBeside", "Matching", "match"]


def _same_name(name: str, among: Mapping[str, object]) -> str | None:
    return name if name in among else None


@frozen
class LoadedBeside:
    """What is loaded together with an optimizer, such as a model, as far as the optimizer's load asks.

    Args:
        find: returns what a name here is called among names of the checkpoint, None when it is not there.
        main_keys: name of a parameter here to the key of its value in the checkpoint, for main values that were not
            saved.
        missing: what is here and not in the checkpoint, over all ranks.
        unexpected: what is in the checkpoint and not here.
    """

    find: Callable[[str, Mapping[str, object]], str | None] = _same_name
    main_keys: Mapping[str, str] = MappingProxyType({})
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


@define
class Matching:
    """Which parameter here is which in a checkpoint, as far as optimizer state goes.

    Args:
        source: the checkpoint.
        beside: what is loaded together with the state, and how names are called.
        state: parameter here to its name there.
        same: parameters here whose optimizer is the one that saved their state.
        here: parameters whose state some rank has.
        missing: what is here but not in the checkpoint; it stays as it was.
        unexpected: what is in the checkpoint but not here; it is left.
        reset: parameter to the reason why its state starts anew.
        frozen: group there to the parameters of it that are frozen here, to their names there: their state is kept.
    """

    source: Source
    beside: LoadedBeside = field(factory=LoadedBeside)
    state: dict[str, str] = field(factory=dict)
    same: list[str] = field(factory=list)
    here: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    reset: dict[str, str] = field(factory=dict)
    frozen: dict[int | None, dict[str, str]] = field(factory=dict)

    def record(self, name: str) -> Mapping[str, Any]:
        """Return what the checkpoint has of a parameter.

        Args:
            name: name here.
        """
        found: Mapping[str, Any] = self.source.manifest.parameters[self.state[name]]
        return found

    def main_key(self, name: str) -> str | None:
        """Return the key of a parameter's main copy in the checkpoint, else of its value, None when there is none.

        Args:
            name: name here.
        """
        parameters = self.source.manifest.parameters
        stored = self.beside.find(name, parameters)
        record = {} if stored is None else parameters[stored]["state"].get(MAIN_PARAM, {})
        key: str | None = record.get("tensor", self.beside.main_keys.get(name))
        return key


def match(
    source: Source, optimizer: NamedState | None, beside: LoadedBeside, *, strict: bool, ranks: Ranks
) -> Matching:
    """Compare names, shapes and optimizers: a collective; nothing is changed.

    Args:
        source: the checkpoint.
        optimizer: the optimizer, or None.
        beside: what is loaded together with it.
        strict: names must be the same on both sides.
        ranks: who loads.

    Raises:
        CheckpointMismatchError: something does not fit.
    """
    stored, find = source.manifest.parameters, beside.find
    found = Matching(source, beside)
    steps = {} if optimizer is None else optimizer_names(optimizer)
    mine = [] if optimizer is None else list(optimizer.names.values())
    found.state = {name: there for name in mine if (there := find(name, stored)) is not None}
    ranks.agree(lambda: _check_shapes(found, optimizer))
    found.here = frozenset[str]().union(*ranks.gather(set(steps) & set(mine)))
    if optimizer is not None and source.manifest.optimizer is None:
        raise mismatch(source, "was saved without an optimizer; load it with optimizer=None")
    used = {name: find(name, stored) for name in sorted(found.here)}
    found.missing = (*beside.missing, *(f"{name} (state)" for name, there in used.items() if there is None))
    for name in () if optimizer is None or optimizer.late is None else optimizer.late.keepable():
        there = find(name, stored)
        if there is not None and (stored[there]["state"] or stored[there]["optimizer"]):
            found.frozen.setdefault(stored[there]["group"], {})[name] = there
    kept = set[str]().union(*ranks.gather({there for of in found.frozen.values() for there in of.values()}))
    left = () if optimizer is None else sorted(set(stored) - set(used.values()) - kept)
    found.unexpected = (*beside.unexpected, *(f"{name} (state)" for name in left))
    if strict:
        routing = None if optimizer is None else optimizer.routing
        _require_names(
            found, [name for name in (routing.frozen if routing else ()) if find(name, stored) in left]
        )
    readers = "" if optimizer is None else readers_of(optimizer)
    views = {} if optimizer is None else views_of(optimizer)
    ranks.agree(lambda: _compare_optimizers(found, steps, views, readers, strict))
    return found


def _require_names(found: Matching, frozen: list[str]) -> None:
    parts = []
    if found.missing:
        parts.append(f"it lacks {shown(found.missing)}")
    if found.unexpected:
        parts.append(f"it has {shown(found.unexpected)}, which is not here")
    if frozen:
        parts.append(
            f"{shown(frozen)} is frozen here, where this sharding gives state no place: build the optimizer with the "
            "parameter trainable and its learning rate 0"
        )
    if parts:
        raise mismatch(
            found.source,
            f"does not fit: {'; '.join(parts)}. strict=False loads what fits, and rename= of load_checkpoint maps old "
            "names to new ones",
            [name.removesuffix(" (state)") for name in (*found.missing, *found.unexpected)],
        )


def _check_shapes(found: Matching, optimizer: NamedState | None) -> None:
    wrong = {}
    for piece in () if optimizer is None else piece_states(optimizer):
        for _, shard in piece.members:
            if shard.name in found.state:
                there = tuple(found.record(shard.name)["shape"])
                if there != shard.shape:
                    wrong[shard.name] = there, shard.shape
    require_same_shapes(found.source, wrong)


def _compare_optimizers(
    found: Matching,
    steps: Mapping[str, str],
    views: Mapping[str, tuple[MatrixView, tuple[int, ...]]],
    readers: str,
    strict: bool,
) -> None:
    plugins = found.source.manifest.plugins
    registry, brought = get_registry(), plugins_of(filter(None, steps.values()))
    there = found.source.manifest.written.get("roles", "")
    otherwise = (
        ""
        if there == readers
        else f" (roles read by {there or 'nobody'} there, by {readers or 'nobody'} here)"
    )
    for name in found.state:
        saved = found.record(name)["optimizer"]
        distribution, ours = plugins.get(saved), brought.get(saved)
        if saved in {steps.get(name), None}:
            seen = _seen_otherwise(found.record(name), views.get(name))
            if distribution and ours and distribution != ours:
                found.reset[name] = f"it was stepped by {saved!r} of {distribution}, here by that of {ours}"
            elif seen:
                found.reset[name] = f"{seen}{otherwise}"
            else:
                found.same.append(name)
            continue
        if distribution and absent_plugin(saved, saved, distribution, registry.plugins()) is not None:
            absent = f"{saved!r} of {distribution}, which is not installed here (pip install {distribution})"
            if strict:
                raise CheckpointMismatchError(
                    f"{found.source.name}: the state of {name!r} was made by {absent}; strict=False lets it start anew",
                    path=found.source.name,
                    names=[name],
                )
            found.reset[name] = f"it was stepped by {absent}"
        else:
            found.reset[name] = f"it was stepped by {saved!r}, here by {steps.get(name)!r}{otherwise}"
    if strict and found.reset:
        described = [f"{name!r}: {why.removesuffix(otherwise)}" for name, why in found.reset.items()]
        raise mismatch(
            found.source,
            f"routes {len(described)} parameters otherwise{otherwise}: {shown(described)}. Build the optimizer with "
            "the same configuration and overrides, or with the checkpoint's routing (build_optimizer(..., "
            "routing=path)), or let their state start anew: strict=False",
            found.reset,
        )


def _seen_otherwise(record: Mapping[str, Any], here: tuple[MatrixView, tuple[int, ...]] | None) -> str:
    """Return how a parameter was seen as other matrices than it is here; nothing if it was not, or nobody knows."""
    if here is None:
        return ""
    there = stored_view(record)
    if there is None:
        return ""
    (before, of), (now, shape) = there, here
    if before.is_like(now, of, shape):
        return ""
    if str(before) == str(now):  # pieces or heads differ, which only some settings ask for
        return f"it was seen as {described_view(before, of)}, is here as {described_view(now, shape)}"
    return f"it was seen as {before}, is here as {now}"
