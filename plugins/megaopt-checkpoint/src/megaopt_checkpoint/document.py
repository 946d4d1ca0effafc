"""What an optimizer is and holds besides tensors, gathered from all ranks for the manifest."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from megaopt_checkpoint.collected import Collected
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.restore.configured import configured
from megaopt_checkpoint.values.encoding import encode
from megaopt_core.errors import CheckpointError
from megaopt_core.parallel import digest_of_tensors
from megaopt_core.params import RoleDecision, is_marked_expert, named_params
from megaopt_core.routing import names_of_several, stages_of_names, wrong_names
from megaopt_core.state import described_view, joins_of, optimizer_names, readers_of, settings_of

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer, OptimizerPart

__all__ = ["describe_optimizer", "require_own_names", "versions"]

type Notes = list[dict[str, Any]]
"""For every group of a part, the keys that steps write there."""

_LISTED = frozenset({"ranges", "objects", "codes"})
"""What a record of a state has of every rank, one entry after the other."""


def versions(optimizer: MegatronOptimizer | None = None) -> dict[str, str]:
    """Return who writes, and when; with an optimizer, who read the roles that its routing rests on.

    Args:
        optimizer: a built optimizer, or None.
    """
    try:
        own = version("megaopt-core")
    except PackageNotFoundError:
        own = "unknown"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    written = {
        "megaopt-core": own,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "time": now,
    }
    if optimizer is not None and readers_of(optimizer):
        written["roles"] = readers_of(optimizer)
    return written


def describe_optimizer(
    optimizer: MegatronOptimizer, collected: Collected, tensors: dict[str, torch.Tensor], ranks: Ranks
) -> dict[str, Any]:
    """Return the optimizer's part of the manifest: a collective.

    Args:
        optimizer: a built optimizer.
        collected: this rank's state.
        tensors: receives tensors that stand in group settings.
        ranks: who saves.
    """
    steps = optimizer_names(optimizer)
    group_of = {
        optimizer.names[param]: index
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    routes = {} if optimizer.routing is None else optimizer.routing.params
    mine = {
        name: {
            "optimizer": steps.get(name, ""),
            "strategy": routes[name].strategy if name in routes else "replicated",
            "group": group_of.get(name, 0),
            "shape": list(collected.shapes.get(name, ())),
            "state": collected.state.get(name, {}),
            **(_described(routes[name].decision, routes[name].spec.shape) if name in routes else {}),
            **({"fresh": True} if name in collected.fresh else {}),
        }
        for name in {**group_of, **collected.state}
    }
    told = ranks.gather_different((mine, [_notes_of(part) for part in optimizer.parts]))
    notes = _joined(optimizer, [of_rank for _, of_rank in told])
    public = zip(optimizer.param_groups, configured(optimizer), notes, strict=True)
    groups = [
        {
            "settings": encode({**settings_of(group), **noted}, tensors, f"optim.groups.{index}"),
            "configured": encode(said, {}, f"optim.groups.{index}.configured"),
        }
        for index, (group, said, noted) in enumerate(public)
    ]
    scaler = None if optimizer.grad_scaler is None else optimizer.grad_scaler.state_dict()
    return {
        "parameters": _merged(of_rank for of_rank, _ in told),
        "groups": groups,
        "scaler": encode(scaler, tensors, "optim.scaler"),
    }


def _notes_of(part: OptimizerPart) -> Notes:
    """Return what steps have noted on this rank.

    Args:
        part: some pieces, and who steps them.

    Raises:
        PluginError: the class does not say right which keys it writes.
    """
    keys = joins_of(part.inner)
    return [{key: group[key] for key in keys if key in group} for group in part.groups]


def _joined_notes(part: OptimizerPart, of_ranks: Sequence[Notes]) -> Notes:
    """Return one note for those of all ranks; where they say the same it stands as it is.

    Args:
        part: this rank's.
        of_ranks: what `_notes_of` returns on each.
    """
    joins, mine = joins_of(part.inner), _notes_of(part)
    for index, note in enumerate(mine):
        for key in note:
            said = [notes[index][key] for notes in of_ranks if index < len(notes) and key in notes[index]]
            if any(value != said[0] for value in said):
                note[key] = joins[key](said)
    return mine


def _joined(optimizer: MegatronOptimizer, of_ranks: Sequence[Sequence[Notes]]) -> Notes:
    """Return what steps have noted on all ranks, for each of this rank's groups."""
    return [
        note
        for index, part in enumerate(optimizer.parts)
        for note in _joined_notes(part, [parts[index] for parts in of_ranks if index < len(parts)])
    ]


def _described(decision: RoleDecision, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return role and view, as JSON has them; the shape is that of the tensor that is viewed."""
    if decision.view is None:
        return {"role": str(decision.role)}
    return {"role": str(decision.role), "view": described_view(decision.view, shape)}


def _merged(of_ranks: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join what every rank knows of each parameter; numbers that all agree on are kept once."""
    parameters: dict[str, Any] = {}
    for of_rank in of_ranks:
        for name, described in of_rank.items():
            present = parameters.setdefault(name, {**described, "state": {}})
            present["shape"] = present["shape"] or described["shape"]
            if "fresh" in described:
                present["fresh"] = True
            for key, record in described["state"].items():
                empty = {kind: [] if kind in _LISTED else value for kind, value in record.items()}
                merged = present["state"].setdefault(key, empty)
                for kind in _LISTED.intersection(record, merged):
                    merged[kind] += [entry for entry in record[kind] if entry not in merged[kind]]
    for described in parameters.values():
        described["state"] = {key: _shortened(record) for key, record in described["state"].items()}
    return parameters


def _shortened(record: dict[str, Any]) -> dict[str, Any]:
    values = [entry[-1] for entry in record.get("ranges", [])]
    if values and all(value == values[0] for value in values):
        return {"value": values[0]}
    return record


def require_own_names(
    optimizer: MegatronOptimizer | None, held: Mapping[str, torch.Tensor], ranks: Ranks
) -> None:
    """Raise where ranks of a pipeline or of an expert group have one name for different tensors: a collective.

    Args:
        optimizer: knows where this rank stands; None, or wrapped by hand: nobody does.
        held: this rank's, by name; those that nothing steps may be alike on several ranks.
        ranks: who saves.

    Raises:
        CheckpointError: a name means several tensors.
    """
    routing, stages = None if optimizer is None else optimizer.routing, dict[str, list[int]]()
    stepped = set[str]() if optimizer is None else set(optimizer.names.values())
    if optimizer is not None and routing is not None:
        shared = {name for name, entry in routing.params.items() if entry.shared}
        experts = {
            name_of(entry.name)
            for name_of, chunk in optimizer.watched_model.named_chunks()
            for entry in named_params(chunk)
            if is_marked_expert(entry.param)
        }
        stages = stages_of_names(held.keys() - shared, experts & held.keys(), routing.axes, routing.rank)
    several = names_of_several(ranks.gather_different(stages))
    if not several:
        return
    mine = {
        name: None if name in stepped else digest_of_tensors([held[name]]) for name in several if name in held
    }
    everywhere = ranks.gather(mine)
    seen = {name: {of_rank[name] for of_rank in everywhere if name in of_rank} for name in several}
    wrong = [name for name in several if None in seen[name] or len(seen[name]) > 1]
    if wrong:
        raise CheckpointError(wrong_names(wrong))
