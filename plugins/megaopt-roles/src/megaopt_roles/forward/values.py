"""What the evaluator computes with where it does not compute with plain Python objects."""

from __future__ import annotations

import ast
from typing import Any

import torch
from attrs import define, field, frozen
from torch import nn

__all__ = [
    "ARGUMENT",
    "JOINED",
    "Axis",
    "Call",
    "Flow",
    "Part",
    "Piece",
    "Source",
    "Use",
    "Weight",
    "deps_of",
    "flows_of",
    "held_by",
    "is_mark",
    "weights_of",
]

ARGUMENT = "argument"
"""The dependency of a value on what the caller passed."""

JOINED = "joined"
"""Among the dependencies of a value: it was put together of several, side by side; nothing was added to it since."""


def is_mark(dep: Any) -> bool:
    """True for what stands among dependencies and is no call.

    Args:
        dep: one of the dependencies of a value.
    """
    return isinstance(dep, str)


@define(eq=False)
class Call:
    """One call of a child module, or one product with a weight.

    Args:
        module: what was called, or the weight.
        deps: what its arguments depend on.
        order: position among the calls of one evaluation.
        site: where in the source it stands: the expressions around it, from the outermost call inwards. The calls of
            one module in the rounds of a loop have the same.
    """

    module: nn.Module | nn.Parameter
    deps: frozenset[Any]
    order: int
    site: tuple[ast.expr, ...] = ()
    by_row: bool = False
    """The rows of a weight do not become features of the result, but lie beside what they were multiplied with."""
    coded: bool = False
    """All that it takes are one-hot codes, made where it is called."""
    cut_off: bool = False
    """No gradient flows through it."""


@frozen
class Part:
    """One item of the tuple that a call returned.

    Args:
        call: the call.
        index: position of the item.
    """

    call: Call
    index: int

    @property
    def module(self) -> nn.Module | nn.Parameter:
        """What was called."""
        return self.call.module

    @property
    def deps(self) -> frozenset[Any]:
        """What the arguments of the call depend on."""
        return self.call.deps

    @property
    def order(self) -> int:
        """Position among the calls of one evaluation."""
        return self.call.order


@define(eq=False)
class Source:
    """What makes the rows of an activation: a projection, or a weight used by hand.

    Args:
        owner: the module, or the parameter.
        size: number of rows.
        root: all rows together.
    """

    owner: nn.Module | nn.Parameter
    size: int
    root: Piece = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.root = Piece(self, None, tuple(range(self.size)))


@define(eq=False)
class Piece:
    """Some rows of a source, cut out of a larger piece.

    Args:
        source: whose rows.
        parent: the piece that it was cut from; None for all rows.
        rows: the rows, ascending.
    """

    source: Source
    parent: Piece | None
    rows: tuple[int, ...]
    children: dict[tuple[int, ...], Piece] = field(factory=dict)
    heads: int = 0
    """Rows of a head, where the activation is shaped into heads; 0 where that was not seen, -1 where it is not so."""
    bounded: bool = False
    """A sigmoid or a tanh is taken of it, or of a sum that it is in."""
    merged: bool = False
    """The pieces that this one was cut into were put together again: the cut says nothing."""

    def cut(self, rows: tuple[int, ...]) -> Piece:
        """Return the piece of these rows, the same object every time."""
        if rows == self.rows:
            return self
        if rows not in self.children:
            self.children[rows] = Piece(self.source, self, rows)
        return self.children[rows]


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
        terms: the activations of its own shape that were added or multiplied to make it.
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
    """All zeros: what a recurrence begins with."""
    call: Call | None = None
    """The call of a module that returned it, while nothing was done to it."""
    factors: tuple[frozenset[Any], ...] = ()
    """What each of the two factors depends on that were multiplied, element by element, to make it."""
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
    """The weights that were added to it, which made it: it may be what these become for a sample."""
    reshaped: bool = False
    """It was given another shape, and nothing was done to it since: its axes may be merged."""
    noise: bool = False
    """It was drawn, and no layer has made it."""
    coded: bool = False
    """It is one-hot codes along its last axis, each by itself: not joined, added up or laid in one axis."""

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

    @property
    def holders(self) -> tuple[nn.Parameter, ...]:
        """The parameters that hold its rows: all but right-hand factors."""
        others = {id(call.module) for call in self.right}
        return tuple(param for param in self.params if id(param) not in others)


@frozen
class Use:
    """One way in which a parameter is used.

    Args:
        kind: `contracted`, `factor` (of a product of parameters), `generated` (a batch of vectors in one), `indexed`
            (by what the caller passed), `looked_up` (by something fixed), `sliced`, `cropped` (sliced along all of
            `inputs`), `expanded`, `fixed` (contracted with something fixed), `depthwise`, `elementwise`, `beside` (laid
            beside activations), `grouped` (each entry meets a group of entries of something fixed), `modulated`
            (a kernel that is scaled, for each sample), `returned`, `padded` (the result of its product), `attending`
            (that goes through a softmax over what it met, or chosen among by one, or handed to attention), `choosing`
            (a softmax is taken of what several products make), `paired` (two parts of what its product makes multiply
            each other), `gating` (several bounded parts of that multiply others), `rectified` (a ReLU or the like is
            taken of it), `noise` (it scales noise that is added to a weight), `mixing` (it holds coefficients
            of a mixture of matrices), `penalized` (one number is made of it,
            and of no activation: a penalty), `softened` (a softmax is taken of it), `measured` (its largest entry or
            norm scales what it meets), `ranked` (what the product of a stack makes), `row` (one row of it meets an
            activation) or `passed` (to something that cannot be read).
        inputs: stored axes that a product sums over.
        outputs: stored axes that become features of the result.
        batch: stored axes that count independent matrices.
        block: stored axis 0 is a stack of blocks of this many, each a matrix of its own.
    """

    kind: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    block: int | None = None


def flows_of(value: Any) -> list[Flow]:
    """Return the activations inside a value, through containers."""
    if isinstance(value, Flow):
        return [value]
    if isinstance(value, dict):
        return [flow for item in value.values() for flow in flows_of(item)]
    if isinstance(value, list | tuple | set):
        return [flow for item in value for flow in flows_of(item)]
    return []


def weights_of(value: Any) -> list[Weight]:
    """Return the weights inside a value, through containers."""
    if isinstance(value, Weight):
        return [value]
    if isinstance(value, dict):
        return [weight for item in value.values() for weight in weights_of(item)]
    if isinstance(value, list | tuple):
        return [weight for item in value for weight in weights_of(item)]
    return []


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
