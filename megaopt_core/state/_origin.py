"""Who steps each parameter, with which settings, and as which matrices: what is saved of it, and compared by loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict

from megaopt_core.errors import CheckpointMismatchError, PluginError, ViewError
from megaopt_core.params._names import shown
from megaopt_core.params._specs import Granularity
from megaopt_core.params._views import MATRIX, MatrixView
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.state._protocol import StatefulOptimizer

__all__ = [
    "ROUTED",
    "STEPPED",
    "described_view",
    "optimizer_names",
    "plugins_of",
    "readers_of",
    "routed_of",
    "settings_of",
    "stepped_otherwise",
    "stored_view",
    "views_of",
]

ROUTED = "routed"
"""Key of a group in torch's schema: its optimizer, the distribution of that, who read roles, and views."""
STEPPED = "stepped"
"""Key in there: the parameters of all groups that have a state, a line each: torch takes lists apart."""
_NOT_SAVED = ("params", "param_names", ROUTED, "foreach", "fused", "capturable", "differentiable")


def readers_of(optimizer: StatefulOptimizer) -> str:
    """Return who read the roles that a routing rests on; empty: nobody.

    Args:
        optimizer: a built optimizer.
    """
    return "" if optimizer.routing is None else ", ".join(optimizer.routing.readers)


def optimizer_names(optimizer: StatefulOptimizer) -> dict[str, str]:
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


def views_of(optimizer: StatefulOptimizer) -> dict[str, tuple[MatrixView, tuple[int, ...]]]:
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


def routed_of(optimizer: StatefulOptimizer) -> list[dict[str, Any]]:
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


def described_view(view: MatrixView, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a view as JSON has it.

    Args:
        view: of a parameter.
        shape: of the tensor that is viewed.
    """
    told = asdict(view, filter=lambda attribute, value: value != attribute.default)
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}
    return {**plain, **({"fused": str(view.fused)} if view.fused else {}), "shape": list(shape)}


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, without its parameters and without how torch computes in this process.

    Args:
        group: a public group.
    """
    return {key: value for key, value in group.items() if key not in _NOT_SAVED}


def stepped_otherwise(
    source: str,
    records: Mapping[str, Mapping[str, Any]],
    optimizer: StatefulOptimizer | None,
    *,
    plugins: Mapping[str, str],
    readers: str,
    strict: bool,
) -> dict[str, str]:
    """Return the parameters that something else stepped when they were saved, each with the reason.

    Args:
        source: what errors call that which is loaded.
        records: parameter here to what is saved of it: `optimizer`, which is None where nobody knows; `role`, `view`
            and `shape` where it was seen as matrices.
        optimizer: what will load it; None: nothing.
        plugins: optimizer there to the distribution that brought it.
        readers: who read roles there.
        strict: raise where there are any.

    Raises:
        CheckpointMismatchError: there are, and the load is strict.
    """
    steps = {} if optimizer is None else optimizer_names(optimizer)
    views = {} if optimizer is None else views_of(optimizer)
    mine = "" if optimizer is None else readers_of(optimizer)
    brought = plugins_of(filter(None, steps.values()))
    differ = f" (roles read by {readers or 'no plugin'} there, by {mine or 'no plugin'} here)"
    otherwise = "" if readers == mine else differ
    found: dict[str, str] = {}
    for name, record in records.items():
        saved, seen = record["optimizer"], _seen_otherwise(record, views.get(name))
        distribution, ours = plugins.get(saved), brought.get(saved)
        if saved in {steps.get(name), None}:
            if distribution and ours and distribution != ours:
                found[name] = f"it was stepped by {saved!r} of {distribution}, here by that of {ours}"
            elif seen:
                found[name] = f"{seen}{otherwise}"
            continue
        if distribution and get_registry().absent_plugin(saved, saved, distribution) is not None:
            absent = f"{saved!r} of {distribution}, which is not installed here (pip install {distribution})"
            if strict:
                raise CheckpointMismatchError(
                    f"{source}: the state of {name!r} was made by {absent}; strict=False lets it start anew",
                    path=source,
                    names=[name],
                )
            found[name] = f"it was stepped by {absent}"
        else:
            found[name] = f"it was stepped by {saved!r}, here by {steps.get(name)!r}{otherwise}"
    if strict and found:
        described = [f"{name!r}: {why.removesuffix(otherwise)}" for name, why in found.items()]
        raise CheckpointMismatchError(
            f"{source} routes {len(described)} parameters otherwise{otherwise}: {shown(described)}. Build the "
            "optimizer with the same configuration and overrides, or with the checkpoint's routing "
            "(build_optimizer(..., routing=path)), or let their state start anew: strict=False",
            path=source,
            names=found,
        )
    return found


def _seen_otherwise(record: Mapping[str, Any], here: tuple[MatrixView, tuple[int, ...]] | None) -> str:
    """Return how a parameter was seen as other matrices than it is here; nothing if it was not, or nobody knows."""
    there = None if here is None else stored_view(record)
    if here is None or there is None:
        return ""
    (before, of), (now, shape) = there, here
    if before.is_like(now, of, shape):
        return ""
    if str(before) == str(now):  # pieces or heads differ, which only some settings ask for
        return f"it was seen as {described_view(before, of)}, is here as {described_view(now, shape)}"
    return f"it was seen as {before}, is here as {now}"
