"""Values that are stacked, or laid side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from megaopt_roles.forward.dependencies import JOINED
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.rows import lies_along, merge
from megaopt_roles.forward.trace import BATCH, Trace
from megaopt_roles.forward.values import Flow, Weight, flows_of, shape_of, together, weights_of
from megaopt_roles.forward.weights.forms import join

__all__ = ["joined", "marked"]


def joined(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what `cat`, `stack` and the like make of several values."""
    flows, found = flows_of((args, kwargs)), weights_of((args, kwargs))
    merge(flow for flow in flows if flow.piece is not None or not _adds_positions(name, args, kwargs))
    if found and not any(flow.deps for flow in flows):
        if all(weight.base is found[0].base and weight.axes == found[0].axes for weight in found):
            return found[0]
        dim = argument(1, "dim", args, kwargs) or 0
        added = "stack" in name
        return join(found, dim if isinstance(dim, int) and name in ("cat", "stack") else None, added=added)
    trace.use_all(found, "beside")
    made = trace.unknown(args, kwargs)
    if name in ("cat", "concat", "concatenate"):
        made = _laid_beside(made, [*found, *flows], argument(1, "dim", args, kwargs) or 0)
    return marked(made)


def marked(made: Flow) -> Flow:
    """Return what was put together of several values, side by side, as such: nothing was added to it since.

    Args:
        made: what depends on all of them.
    """
    return evolve(made, deps=made.deps | {JOINED}) if len(made.deps) > 1 else made


def _adds_positions(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True where values are stacked along an axis before their features: what is made of parts are steps of a scan."""
    dim = argument(1, "dim", args, kwargs)
    return name == "stack" and (dim is None or (isinstance(dim, int) and dim in (0, 1)))


def _laid_beside(made: Flow, parts: Sequence[Flow | Weight], dim: Any) -> Flow:
    """Return activations that lie along positions beside others, or beside the rows of a weight.

    What is known of one tells how many dimensions they have, and how many features; not how many positions. The rows of
    each stay what they were, as those of the terms of a sum: what is cut from all is cut from each.

    Args:
        made: what depends on all of them.
        parts: what lies side by side.
        dim: the dimension along which it does.
    """
    held = [
        Flow(flow.deps, flow.tensor, flow.piece)
        for part in parts
        for flow in (part.terms or (part,) if isinstance(part, Flow) else ())
        if flow.piece is not None and flow.tensor is not None
    ]
    kept = [flow for flow in held if not lies_along(flow, dim)]
    shapes = [*map(shape_of, kept), *(part.shape for part in parts if isinstance(part, Weight))]
    shape = next((shape for shape in shapes if shape), ())
    at = dim % len(shape) if shape and isinstance(dim, int) and -len(shape) <= dim < len(shape) else None
    if at is None or (not kept and at == len(shape) - 1):
        return made
    sizes = [own[at] for own in map(shape_of, parts) if own is not None and len(own) == len(shape)]
    whole = (*shape[:at], max(sum(sizes), shape[at] + BATCH[1]), *shape[at + 1 :])
    terms = [evolve(flow, tensor=_longer(flow.tensor, at, whole)) for flow in held]
    if not terms or len(kept) < len(held) or any(term.tensor is None for term in terms):
        return evolve(made, tensor=torch.empty(whole, device="meta"))
    return together(made.deps, terms)


def _longer(rows: torch.Tensor | None, dim: int, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return the numbers of rows that stay the same along a dimension, in a shape that is longer there.

    None where it differs elsewhere.
    """
    if rows is None or rows.dim() != len(shape) or not rows.numel():
        return None
    one = rows.narrow(dim, 0, 1)
    fits = all(
        size == have for at, (size, have) in enumerate(zip(shape, one.shape, strict=True)) if at != dim
    )
    return one.expand(shape) if fits else None
