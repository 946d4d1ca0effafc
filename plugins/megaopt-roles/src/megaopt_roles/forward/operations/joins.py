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
from megaopt_roles.forward.values import Flow, Weight, flows_of, shape_of, weights_of
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
    beside = _laid_beside([*found, *flows], argument(1, "dim", args, kwargs))
    known = beside if name in ("cat", "concat", "concatenate") else None
    return marked(evolve(trace.unknown(args, kwargs), tensor=known))


def marked(together: Flow) -> Flow:
    """Return what was put together of several values, side by side, as such: nothing was added to it since.

    Args:
        together: what depends on all of them.
    """
    return evolve(together, deps=together.deps | {JOINED}) if len(together.deps) > 1 else together


def _adds_positions(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """True where values are stacked along an axis before their features: what is made of parts are steps of a scan."""
    dim = argument(1, "dim", args, kwargs)
    return name == "stack" and (dim is None or (isinstance(dim, int) and dim in (0, 1)))


def _laid_beside(parts: Sequence[Flow | Weight], dim: Any) -> torch.Tensor | None:
    """Return what stands in for activations that lie along positions beside others, or beside the rows of a weight.

    What is known of one tells how many dimensions they have, and how many features; not how many positions.
    """
    for part in parts if isinstance(dim, int) and dim > 0 else ():
        shape = shape_of(part) if isinstance(part, Weight) or part.piece is not None else None
        if shape is None or dim >= len(shape) - 1 or (isinstance(part, Flow) and lies_along(part, dim)):
            continue
        return torch.empty((BATCH[0], *shape[1:dim], shape[dim] + BATCH[1], *shape[dim + 1 :]), device="meta")
    return None
