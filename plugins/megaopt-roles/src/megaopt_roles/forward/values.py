"""What the evaluator computes with where it does not compute with plain Python objects."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Mapping, ValuesView
from typing import Any

import torch
from attrs import frozen
from torch import nn

from megaopt_roles.forward.dependencies import Call, Part
from megaopt_roles.forward.pieces import Piece

__all__ = [
    "Axis",
    "Flow",
    "Weight",
    "deps_of",
    "flows_of",
    "held_by",
    "is_abstract",
    "shape_of",
    "terms_of",
    "together",
    "weights_of",
]


@frozen(eq=False)
class Flow:
    """An activation, or anything else that is not known.

    Args:
        deps: the calls that it came from, `ARGUMENT` among them.
        tensor: stands in for its shape; where `piece` is set, every element is the number of its row.
        piece: the rows of a projection that it holds.
        one_hot: it is a one-hot encoding.
        soft: it is a softmax: the rows of a weight that it is multiplied with are looked up, a little of each.
        fresh: it is what a projection returned, untouched.
        mixed: the pieces that were added or multiplied to make it.
        terms: the activations of its own shape that were added or multiplied to make it, that lie side by side along
            positions, or of which it is one.
    """

    deps: frozenset[Any] = frozenset()
    tensor: torch.Tensor | None = None
    piece: Piece | None = None
    one_hot: bool = False
    fresh: bool = False
    mixed: tuple[Piece, ...] = ()
    terms: tuple[Flow, ...] = ()
    soft: bool = False
    zero: bool = False
    """All zeros: what a recurrence begins with, or what stands in for something that is not given."""
    call: Call | None = None
    """The call of a module that returned it, while nothing was done to it."""
    factors: tuple[frozenset[Any], ...] = ()
    """What each of the two factors depends on that were multiplied, element by element, to make it."""
    shares: frozenset[Any] = frozenset()
    """What a softmax depends on that multiplied, element by element, what other layers made."""
    picked: bool = False
    """Rows of it were picked, by an index that was given."""
    held: tuple[frozenset[Any], ...] = ()
    """What each item depends on of an object, or of several values that may be returned: they are no sum."""
    error: frozenset[Any] = frozenset()
    """What single layers made, in a difference that it is: where it is squared, these were predictions."""
    length: bool = False
    """It is a norm: what is divided by it is a direction."""
    weighed: tuple[Weight, tuple[int, ...]] | None = None
    """The weight that it was multiplied with, element by element, and the shape that it had before."""
    moved: tuple[Weight, ...] = ()
    """The weights, of several axes, that it was added to: the sum may be what these become for a sample."""
    reshaped: bool = False
    """It was given another shape, and nothing was done to it since: its axes may be merged."""
    noise: bool = False
    """It was drawn, or is the gradient of a weight, and no layer has made it."""
    eye: bool = False
    """It is the identity matrix, whose rows are one-hot codes."""
    coded: bool = False
    """It is one-hot codes along its last axis, each by itself: not joined, added up or laid in one axis."""

    place: object = None
    """The loop whose items it counts: the place of another item each time."""
    changed: tuple[Flow, Mapping[int | Flow, Any]] | None = None
    """What it was before something was put into it, and what was put where."""

    def part(self, index: int) -> Flow:
        """Return one item of it, taken for a tuple that a module returned."""
        return Flow(self.deps if self.call is None else frozenset({Part(self.call, index)}))

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The piece that it holds, or the pieces that it is a mix of."""
        return self.mixed if self.piece is None else (self.piece,)

    @property
    def behind(self) -> tuple[Piece, ...]:
        """The pieces that it holds, or was made of, term by term: a function may have been taken of their sum."""
        return self.pieces or tuple(piece for term in self.terms for piece in term.behind)


@frozen
class Axis:
    """An axis of a stored weight, or the part of it that is left.

    Args:
        index: which axis of the stored tensor; -1 for an axis that was added.
        rows: the positions that are left; None for all.
        block: the stored axis was reshaped to `[blocks, block]`, and this is the inner part.
        merged: the stored axes that were flattened into this one, behind `index`.
    """

    index: int
    rows: tuple[int, ...] | None = None
    block: int | None = None
    merged: tuple[int, ...] = ()

    @property
    def indices(self) -> set[int]:
        """All stored axes behind this one."""
        return {self.index, *self.merged} - {-1}


@frozen(eq=False)
class Weight:
    """A parameter, or what was made of parameters alone.

    Args:
        params: the parameters that it depends on.
        shape: the shape that it has now; None when it is not known.
        axes: where each axis comes from; None when it is not known.
        base: the parameter whose axes these are.
        deps: activations that it was mixed with element by element (a dynamic gain).
        right: the products of parameters that made it, as calls of their right-hand factors: its rows are those of
            the left-hand one, and a right-hand factor is to them what a layer is to activations.
    """

    params: tuple[nn.Parameter, ...]
    shape: tuple[int, ...] | None
    axes: tuple[Axis, ...] | None
    base: nn.Parameter
    deps: frozenset[Any] = frozenset()
    right: tuple[Call, ...] = ()
    mixers: tuple[tuple[int, Weight], ...] = ()
    """What mixed the matrices of a stack, with the stored axis that counted them: in its place are those it made."""

    repeated: bool = False
    """It was expanded for each sample: what a product with another weight makes of it is an activation."""

    @property
    def holders(self) -> tuple[nn.Parameter, ...]:
        """The parameters that hold its rows: all but right-hand factors."""
        others = {id(call.module) for call in self.right}
        return tuple(param for param in self.params if id(param) not in others)


def is_abstract(value: Any) -> bool:
    """True for values that are not plain Python objects."""
    return isinstance(value, Flow | Weight)


def shape_of(value: Any) -> tuple[int, ...] | None:
    """Return the shape of an activation or a weight; None where it is not known, and for anything else."""
    if isinstance(value, Weight):
        return value.shape
    known = isinstance(value, Flow) and value.tensor is not None
    return tuple(value.tensor.shape) if known else None


def terms_of(*flows: Flow) -> tuple[Flow, ...]:
    """Return the activations of one shape that several go on with; none where it is not known of all, or not one."""
    found = tuple(
        Flow(term.deps, term.tensor, term.piece) for flow in flows for term in (flow.terms or (flow,))
    )
    sizes = {None if flow.tensor is None or flow.piece is None else flow.tensor.shape for flow in found}
    return found if len(sizes) == 1 and None not in sizes else ()


def together(deps: frozenset[Any], terms: Iterable[Flow]) -> Flow:
    """Return activations of one shape as one: what is cut from all of them is cut from each.

    Args:
        deps: what it depends on.
        terms: the activations.
    """
    found = tuple(terms)
    shape = next((flow.tensor.to("meta") for flow in found if flow.tensor is not None), None)
    return Flow(deps, shape, mixed=tuple(piece for flow in found for piece in flow.pieces), terms=found)


def flows_of(value: Any) -> list[Flow]:
    """Return the activations inside a value, through containers."""
    if isinstance(value, Flow):
        return [value]
    return [flow for item in _inside(value) for flow in flows_of(item)]


def weights_of(value: Any) -> list[Weight]:
    """Return the weights inside a value, through containers."""
    if isinstance(value, Weight):
        return [value]
    return [weight for item in _inside(value) for weight in weights_of(item)]


def _inside(value: Any) -> Iterable[Any]:
    """Return what a container holds, of a dictionary its values; nothing for anything else."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set | ValuesView | ItemsView) else ()


def held_by(value: Any) -> tuple[frozenset[Any], ...]:
    """Return what each item of a container or object depends on, or a value as a whole."""
    if isinstance(value, Flow) and value.held:
        return value.held
    items = value.values() if isinstance(value, dict) else value
    return tuple(map(deps_of, items)) if isinstance(value, list | tuple | dict) else (deps_of(value),)


def deps_of(value: Any) -> frozenset[Any]:
    """Return what a value depends on, through containers."""
    found: frozenset[Any] = frozenset()
    for flow in flows_of(value):
        found |= flow.deps
    for weight in weights_of(value):
        found |= weight.deps
    return found
