"""What no layer made: one-hot codes, positions of the largest entries, what a recurrence begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from megaopt_roles.forward.dependencies import ARGUMENT
from megaopt_roles.forward.operations import lookups
from megaopt_roles.forward.operations.arguments import argument
from megaopt_roles.forward.operations.entrywise import anything
from megaopt_roles.forward.trace import Trace
from megaopt_roles.forward.values import Flow, Weight, deps_of, flows_of
from megaopt_roles.forward.weights import contractions

__all__ = ["cut_off", "equal", "eye", "nothing", "scatter", "zeros"]


_FILLED = ("ones_like", "new_ones", "full_like", "new_full")
"""What fills a tensor with one number, as large as another one: nothing of that goes into it."""


def cut_off(trace: Trace, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return a value through which no gradient flows: it comes from no call any more."""
    if name == "detach" and args and isinstance(args[0], Weight):
        return args[0]
    deps = frozenset[Any]() if name in _FILLED else deps_of((args, kwargs))
    if name.startswith("arg"):
        lookups.note_ranks(trace, args[:1])
    tensor = (
        args[0].tensor
        if args and isinstance(args[0], Flow) and name.startswith(("detach", "zeros_like"))
        else None
    )
    tensor = None if tensor is None else tensor.to("meta")
    soft = name == "detach" and any(flow.soft for flow in flows_of(args[:1]))
    one_hot = name == "one_hot" or (name == "eq" and len(args) == 2 and equal(*args))
    return Flow(
        frozenset({ARGUMENT}) if deps else deps,
        tensor,
        one_hot=one_hot,
        soft=soft,
        noise=name in ("rand_like", "randn_like")
        or (name == "detach" and any(flow.noise for flow in flows_of(args[:1]))),
        coded=one_hot and bool(deps),
        zero=name in ("zeros_like", "new_zeros"),
    )


def scatter(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what `scatter` does: one-hot codes where it writes single ones into what no layer made.

    Several ones at a time, by an index without an axis of one at its end, are features: what somebody has bought.
    """
    made, written = anything(trace, "scatter", args, kwargs), argument(3, "value", args, kwargs)
    at = argument(2, "index", args, kwargs)
    single = isinstance(at, Flow) and at.tensor is not None and tuple(at.tensor.shape[-1:]) == (1,)
    if not (single and isinstance(written, int | float) and written == 1 and isinstance(made, Flow)):
        return made
    codes = made.deps == {ARGUMENT}
    return evolve(made, one_hot=codes, coded=codes)


def equal(left: Any, right: Any) -> bool:
    """True where `left == right` makes one-hot codes: of what is given, compared with all of something fixed."""
    return any(
        isinstance(given, Flow) and given.deps == {ARGUMENT} and contractions.is_fixed(fixed)
        for given, fixed in ((left, right), (right, left))
    )


def zeros(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what a recurrence begins with: an activation, which no table is looked up with."""
    return Flow(zero=True)


def eye(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return the identity matrix: what is given picks the one-hot codes that are its rows."""
    return Flow(eye=True)


def nothing(trace: Trace, args: Sequence[Any], kwargs: dict[str, Any]) -> Flow:
    """Return what says nothing of the weights that it is made of: questions about the types of tensors."""
    return Flow()
