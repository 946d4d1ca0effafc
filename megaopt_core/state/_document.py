"""What an optimizer is and holds besides tensors, gathered from all ranks for the manifest."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict

from megaopt_core.errors import CheckpointError, CheckpointMismatchError, PluginError, ViewError
from megaopt_core.parallel._digest import digest_of_tensors
from megaopt_core.params._names import named_params
from megaopt_core.params._parts import is_marked_expert
from megaopt_core.params._roles import RoleDecision
from megaopt_core.params._specs import Granularity
from megaopt_core.params._views import MATRIX, MatrixView
from megaopt_core.registry._registry import get_registry
from megaopt_core.routing._agreement import names_of_several, stages_of_names, wrong_names
from megaopt_core.state._collected import Collected
from megaopt_core.state._notes import Notes, joined_notes, notes_of
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._values.encoding import encode

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = [
    "ROUTED",
    "STEPPED",
    "configured",
    "describe_optimizer",
    "described_view",
    "optimizer_names",
    "plugins_of",
    "readers_of",
    "require_own_names",
    "routed_of",
    "settings_of",
    "stored_view",
    "versions",
    "views_of",
]


ROUTED = "routed"
"""Key of a group in torch's schema: its optimizer, the distribution of that, who read roles, and views."""
STEPPED = "stepped"
"""Key in there: the parameters of all groups that have a state, a line each: torch takes lists apart."""
_NOT_SAVED = ("params", "param_names", ROUTED, "foreach", "fused", "capturable", "differentiable")
_LISTED = frozenset({"ranges", "objects", "codes"})
"""What a record of a state has of every rank, one entry after the other."""


def versions(optimizer: NamedState | None = None) -> dict[str, str]:
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


def readers_of(optimizer: NamedState) -> str:
    """Return who read the roles that a routing rests on; empty: nobody.

    Args:
        optimizer: a built optimizer.
    """
    return "" if optimizer.routing is None else ", ".join(optimizer.routing.readers)


def optimizer_names(optimizer: NamedState) -> dict[str, str]:
    """Return for every parameter of this rank the name of the optimizer that steps it.

    Args:
        optimizer: a built optimizer; of one that was wrapped by hand, the class's name.
    """
    names = {}
    for part in optimizer.parts:
        for piece in part.pieces:
            names.update({shard.name: type(part.inner).__name__ for _, shard in piece.spec.members})
    routes = {} if optimizer.routing is None else optimizer.routing.params
    return names | {name: entry.spec.optimizer for name, entry in routes.items()}


def plugins_of(optimizers: Iterable[str]) -> dict[str, str]:
    """Return the distributions that provide optimizers.

    Args:
        optimizers: registered names; others are left out.
    """
    found = {}
    for name in sorted(set(optimizers)):
        try:
            found[name] = get_registry().owner("optimizer", name).distribution or ""
        except PluginError:
            continue
    return found


def views_of(optimizer: NamedState) -> dict[str, tuple[MatrixView, tuple[int, ...]]]:
    """Return how each parameter is seen that an optimizer steps as matrices, and the shape of what is viewed.

    Args:
        optimizer: a built optimizer.
    """
    routes = {} if optimizer.routing is None else optimizer.routing.params
    return {
        name: (entry.decision.view or MATRIX, entry.spec.shape)
        for name, entry in routes.items()
        if entry.spec.granularity is Granularity.TENSOR
    }


def routed_of(optimizer: NamedState) -> list[dict[str, Any]]:
    """Return for each group what steps it, what brings that, who read the roles, and views; nothing if by hand.

    Views are those of parameters that are stepped as matrices, but for those that are seen as the one that is stored.

    Args:
        optimizer: a built optimizer.
    """
    if optimizer.routing is None:
        return []
    steps, roles, views = optimizer_names(optimizer), readers_of(optimizer), views_of(optimizer)
    members = [[optimizer.names[param] for param in group["params"]] for group in optimizer.param_groups]
    plugins = plugins_of(steps[name] for group in members for name in group[:1])
    routed = []
    for group in members:
        name = steps[group[0]] if group else ""
        seen = {one: described_view(*views[one]) for one in group if one in views}
        told = {one: view for one, view in seen.items() if view.keys() > {"shape"}}
        about = {"optimizer": name, "distribution": plugins.get(name, ""), "roles": roles}
        routed.append({**about, "views": told} if seen else about)
    return routed


def stored_view(described: Mapping[str, Any]) -> tuple[MatrixView, tuple[int, ...]] | None:
    """Return how a parameter was seen as matrices, and the shape of what was viewed; None if that was not kept.

    Args:
        described: what is saved of the parameter.

    Raises:
        CheckpointMismatchError: it is no view.
    """
    if "role" not in described:
        return None
    told = described.get("view", {})
    try:
        view = {**told}
        shape = tuple(map(int, view.pop("shape", described["shape"])))
        return MatrixView(**view), shape
    except (TypeError, ValueError, ViewError) as error:
        raise CheckpointMismatchError(
            f"{told!r:.200} is no view of a parameter as matrices: {error}"
        ) from error


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, without its parameters and without how torch computes in this process.

    Args:
        group: a public group.
    """
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def configured(optimizer: NamedState) -> list[dict[str, Any]]:
    """Return what the configuration says about each group's settings, as far as it says something.

    Args:
        optimizer: a built optimizer.
    """
    said: list[dict[str, Any]] = [
        {key: part.inner.defaults[key] for key in settings_of(group) if key in part.inner.defaults}
        for part in optimizer.parts
        for group in part.groups
    ]
    routing = optimizer.routing
    if routing is not None:
        indices = [index for child in routing.children for index in child.groups]
        for position, (values, group) in enumerate(zip(said, optimizer.param_groups, strict=True)):
            if group["params"]:
                entry = routing.params.get(optimizer.names[group["params"][0]])
                if entry is not None:  # else it was wrapped by hand
                    values.update(routing.groups[entry.spec.group].values)
            elif len(indices) == len(said):
                values.update(routing.groups[indices[position]].values)
    return said


def describe_optimizer(
    optimizer: NamedState, collected: Collected, tensors: dict[str, torch.Tensor], ranks: Ranks
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
    told = ranks.gather_different((mine, [notes_of(part) for part in optimizer.parts]))
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


def _joined(optimizer: NamedState, of_ranks: Sequence[Sequence[Notes]]) -> Notes:
    """Return what steps have noted on all ranks, for each of this rank's groups."""
    return [
        note
        for index, part in enumerate(optimizer.parts)
        for note in joined_notes(part, [parts[index] for parts in of_ranks if index < len(parts)])
    ]


def _described(decision: RoleDecision, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return role and view, as JSON has them; the shape is that of the tensor that is viewed."""
    if decision.view is None:
        return {"role": str(decision.role)}
    return {"role": str(decision.role), "view": described_view(decision.view, shape)}


def described_view(view: MatrixView, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a view as JSON has it.

    Args:
        view: of a parameter.
        shape: of the tensor that is viewed.
    """
    told = asdict(view, filter=lambda attribute, value: value != attribute.default)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}
    return {**plain, **({"fused": str(view.fused)} if view.fused else {}), "shape": list(shape)}


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


def require_own_names(optimizer: NamedState | None, held: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
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
