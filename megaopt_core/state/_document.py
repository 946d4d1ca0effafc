"""What an optimizer is and holds besides tensors, gathered from all ranks for the manifest."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, astuple

from megaopt_core.errors import PluginError
from megaopt_core.params._roles import RoleDecision
from megaopt_core.params._specs import Granularity
from megaopt_core.params._views import MATRIX, MatrixView
from megaopt_core.registry._registry import get_registry
from megaopt_core.state._collected import Collected
from megaopt_core.state._notes import Notes, joined_notes, notes_of
from megaopt_core.state._ranks import Ranks
from megaopt_core.state._values.encoding import encode

if TYPE_CHECKING:
    from megaopt_core.state._protocol import NamedState

__all__ = [
    "ROUTED",
    "configured",
    "describe_optimizer",
    "digest_of_views",
    "optimizer_names",
    "plugins_of",
    "readers_of",
    "settings_of",
    "stored_view",
    "versions",
    "views_of",
]


ROUTED = "routed"
"""Key of a group in torch's schema: its optimizer, the distribution of that, who read roles, a digest of views."""
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
    shape_of = {name: tuple(param.shape) for param, name in optimizer.names.items()}
    return {
        name: (entry.decision.view or MATRIX, shape_of[name])
        for name, entry in routes.items()
        if entry.spec.granularity is not Granularity.ELEMENT and name in shape_of
    }


def digest_of_views(names: Iterable[str], views: Mapping[str, tuple[MatrixView, tuple[int, ...]]]) -> str:
    """Return what tells whether parameters are seen as the same matrices elsewhere, on parts of them too.

    Args:
        names: of the parameters of a group.
        views: what :func:`views_of` returned.

    Returns:
        Some digits; nothing where one of the parameters is not known here, or is not stepped as matrices.
    """
    listed = sorted(names)
    if not listed or not views.keys() >= set(listed):
        return ""
    told = [
        (name, astuple(views[name][0].in_proportion(), filter=lambda attribute, _: bool(attribute.eq)))
        for name in listed
    ]
    return blake2b(repr(told).encode(), digest_size=8).hexdigest()


def stored_view(described: Mapping[str, Any]) -> tuple[MatrixView, tuple[int, ...]] | None:
    """Return how a parameter was seen as matrices, and the shape of what was viewed; None if that was not kept.

    Args:
        described: what is saved of the parameter.
    """
    if "role" not in described:
        return None
    view = dict(described.get("view", {}))
    shape = tuple(view.pop("shape", described["shape"]))
    return MatrixView(**view), shape


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
    shape_of = {name: tuple(param.shape) for param, name in optimizer.names.items()}
    mine = {
        name: {
            "optimizer": steps.get(name, ""),
            "strategy": routes[name].strategy if name in routes else "replicated",
            "group": group_of.get(name, 0),
            "shape": list(collected.shapes.get(name, ())),
            "state": collected.state.get(name, {}),
            **(_described(routes[name].decision, shape_of[name]) if name in routes else {}),
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
    view = asdict(decision.view, filter=lambda attribute, value: value != attribute.default)
    return {"role": str(decision.role), "view": {**view, "shape": list(shape)}}


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
