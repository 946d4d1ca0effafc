"""Comparing what an optimizer has here with what a checkpoint has, by name, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.source import Source
from megaopt_core.precision import MAIN_PARAM
from megaopt_core.state import (
    mismatch,
    optimizer_names,
    piece_states,
    require_names,
    require_same_shapes,
    stepped_otherwise,
)

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

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
    source: Source, optimizer: MegatronOptimizer | None, beside: LoadedBeside, *, strict: bool, ranks: Ranks
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
        raise mismatch(source.name, "was saved without an optimizer; load it with optimizer=None")
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
        frozen = [name for name in (routing.frozen if routing else ()) if find(name, stored) in left]
        require_names(source.name, found.missing, found.unexpected, frozen)
    found.reset = ranks.agree(
        lambda: stepped_otherwise(
            source.name,
            {name: found.record(name) for name in found.state},
            optimizer,
            plugins=source.manifest.plugins,
            readers=source.manifest.written.get("roles", ""),
            strict=strict,
        )
    )
    found.same = [name for name in found.state if name not in found.reset]
    return found


def _check_shapes(found: Matching, optimizer: MegatronOptimizer | None) -> None:
    wrong = {}
    for piece in () if optimizer is None else piece_states(optimizer):
        for _, shard in piece.members:
            if shard.name in found.state:
                there = tuple(found.record(shard.name)["shape"])
                if there != shard.shape:
                    wrong[shard.name] = there, shard.shape
    require_same_shapes(found.source.name, wrong)
