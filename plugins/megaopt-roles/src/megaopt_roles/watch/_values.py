"""The knowledge that a watched forward has of a tensor, and its way through views and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from attrs import field, frozen

__all__ = [
    "NOTHING", "WEIGHED", "Atom", "Axes", "Met", "Run", "Value", "blank", "merged", "reshaped", "weighed",
]  # fmt: skip


class Met(StrEnum):
    """The way by which a product's result reached a value.

    `DIRECT`: as it is. `SCALED`: by a gain. `GATED`: by what others made. `SCORED`: a product compared it with another.
    `JOINED`: a product joined it with others.
    """

    DIRECT = "direct"
    SCALED = "scaled"
    GATED = "gated"
    SCORED = "scored"
    JOINED = "joined"


class Atom(NamedTuple):
    """A run of indices of one dimension of a tensor.

    Args:
        param: the parameter that has this dimension, or whose product has it as its features; None: neither.
        dim: which dimension of the parameter it is.
        stride: how many of its indices lie between two of the run.
        size: how many indices the run has.
        first: where in the dimension the run begins.
    """

    param: int | None
    dim: int
    stride: int
    size: int
    first: int = 0


type Axes = tuple[tuple[Atom, ...], ...]
"""For every dimension of a tensor the atoms that it is made of, outermost first."""


class Run(NamedTuple):
    """A cut: a run of indices of a dimension of a parameter, or of the features of its product."""

    param: int
    dim: int
    first: int
    size: int
    stride: int


@frozen(eq=False)
class Value:
    """The knowledge of a tensor: it is made of parameters alone, or it is an activation, or neither.

    Args:
        at: when it was made.
        root: when the memory was written that it is a view of.
        weights: the parameters that it is made of, where it is made of nothing else.
        rows: those of them that hold its rows, where a product of parameters made it.
        makers: the last products behind an activation, and how each was met; None: it is no activation.
        axes: the atoms of its dimensions; None: they were lost sight of.
        also: the axes of what was added to it.
        parts: which parts of cuts it is, as `(run, first index)`; nothing was computed with it since but by entries.
        loose: which parts of cuts it was computed from by entries.
        inner: it depends on nothing that the model was given.
        normed: it was divided by a size of its own.
        one_hot: it is a one-hot code of ids.
        zero: it holds nothing yet.
        noisy: a weight that something fixed multiplied.
        soft: it comes out of a softmax.
        made: a parameter took part.
        product: it comes out of a product with a parameter.
        sources: the values that it was computed from.
        summing: weights that it multiplies by entries, dimensions whose sum is a product, and what else made it.
    """

    at: int = 0
    root: int = 0
    weights: frozenset[int] = frozenset()
    rows: frozenset[int] = frozenset()
    makers: frozenset[tuple[int, Met]] | None = None
    axes: Axes | None = field(default=None, repr=False)
    also: tuple[Axes, ...] = field(default=(), repr=False)
    parts: frozenset[tuple[Run, int]] = frozenset()
    loose: frozenset[tuple[Run, int]] = frozenset()
    inner: bool = False
    normed: bool = False
    one_hot: bool = False
    zero: bool = False
    noisy: bool = False
    soft: bool = False
    made: bool = False
    product: bool = False
    sources: tuple[Value, ...] = field(default=(), repr=False)
    summing: tuple[frozenset[int], frozenset[int], frozenset[int]] | None = None

    @property
    def is_activation(self) -> bool:
        """Whether it depends on what the model was given."""
        return self.makers is not None

    @property
    def every_axes(self) -> tuple[Axes, ...]:
        """The axes of everything that was added up."""
        return (*(() if self.axes is None else (self.axes,)), *self.also)

    @property
    def projected(self) -> frozenset[int]:
        """The weights that only project the rows of others."""
        return self.weights - self.rows

    @property
    def made_by(self) -> frozenset[int]:
        """The parameters whose products are the last behind it."""
        return frozenset(param for param, _ in self.makers or ())


NOTHING = Value()
"""The knowledge of a constant."""


def blank(size: int) -> tuple[Atom, ...]:
    """Return the atoms of a dimension that is no parameter's.

    Args:
        size: its size.
    """
    return (Atom(None, 0, 1, size),) if size > 1 else ()


WEIGHED = -1
"""In place of a dimension: it is one of what a softmax weighed."""


def weighed(shape: Sequence[int]) -> Axes:
    """Return the axes of what a softmax weighed.

    Args:
        shape: its sizes.
    """
    return tuple((Atom(None, WEIGHED, 1, size),) for size in shape)


def merged(atoms: Sequence[Atom]) -> Atom | None:
    """Return one atom for a run of adjacent ones; None where they do not lie side by side.

    Args:
        atoms: of one dimension.
    """
    if not atoms:
        return None
    param, dim, stride, size, first = atoms[0]
    for other in atoms[1:]:
        if (other.param, other.dim) != (param, dim) or stride != other.stride * other.size:
            return None
        stride, size = other.stride, size * other.size
        first = max(first, other.first)
    return Atom(param, dim, stride, size, first)


def reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Return the atoms of a tensor that is seen with other sizes; None where an atom would be cut unevenly.

    Args:
        axes: its atoms as it is.
        shape: the new sizes.
    """
    todo, new = [atom for dim in axes for atom in dim][::-1], []
    for size in shape:
        own, have = [], 1
        while have < size:
            if not todo or size % have:
                return None
            atom, need = todo.pop(), size // have
            if atom.size > need:
                if atom.size % need:
                    return None
                rest = atom.size // need
                todo.append(atom._replace(size=rest))
                atom = atom._replace(stride=atom.stride * rest, size=need)
            elif need % atom.size:
                return None
            own.append(atom)
            have *= atom.size
        new.append(tuple(own))
    return None if todo else tuple(new)
