"""Ways in which a parameter is used, and what one evaluation has noted of them."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field, frozen
from torch import nn

from megaopt_roles.forward.sources.stored_weights import stored_weight
from megaopt_roles.forward.values import Flow, Weight

__all__ = ["Use", "UseNotes"]


@frozen
class Use:
    """One way in which a parameter is used.

    Of products, `kind` is one of

    - `contracted`: a product with an activation sums over some of its axes
    - `factor`: it is a factor of a product of parameters alone; `generated`: it holds a vector for each of many of them
    - `depthwise`: a convolution takes each channel by itself
    - `row`: one row of it meets an activation
    - `modulated`: it is a kernel, which something of each sample scales
    - `carried`: activations are added to it, and a product takes the sum: it may be the state of a recurrence
    - `moved`: activations are added to it, and a product takes the sum for a weight
    - `mixing`: it holds coefficients of a mixture of matrices
    - `blended`: shares that a softmax makes mix its matrices
    - `fixed`: a product with something fixed sums over its axes

    of what is picked or laid out,

    - `indexed`, `looked_up`: its rows are picked, by what the caller passed or by something fixed
    - `sliced`: a part of it is taken; `shortened`: along another axis than the first; `cropped`: along several
    - `expanded`, `padded`: it, or the result of its product, is made larger
    - `beside`: it is laid beside activations

    of what goes entry by entry,

    - `elementwise`: no product sums over its axes
    - `grouped`: each entry meets a group of entries of something fixed
    - `masked`: something fixed multiplies it, and a product with it sums over positions
    - `noise`: it scales noise, or a gradient, that is added to a weight

    of what one number or a choice is made of,

    - `penalized`: one number is made of it, and of no activation
    - `measured`: its largest entry or its norm scales what it meets
    - `softened`: a softmax is taken of it
    - `attending`: it goes through a softmax over what it met, is chosen among by one, or is handed to attention
    - `ranked`: what the product of a stack makes is ranked
    - `triangular`: what lies above, or below, a diagonal is taken for zero

    of what its product makes,

    - `squared`: it is squared, or the product is that of the weight with itself
    - `choosing`: with other products, what a softmax is taken of
    - `paired`: two parts that multiply each other
    - `gating`: several bounded parts that multiply others
    - `sharing`: the share of one activation in a mixture with another one, which has the rest
    - `weighing`: one score for each of several activations, which a softmax of the scores weighs
    - `proportioning`: a softmax of it multiplies what other layers made, and the products are added up
    - `rectified`: what a ReLU or the like is taken of

    and of what leaves sight, `returned` as it is, or `passed` to something that cannot be read.

    Args:
        kind: one of these.
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


_OF_ROWS = ("indexed", "looked_up", "sliced", "shortened", "fixed", "elementwise", "beside")
"""Kinds that say nothing of a right-hand factor of a product of parameters."""


@define(eq=False, slots=False)
class UseNotes:
    """How one evaluation has seen parameters used.

    Args:
        uses: how each parameter, by identity, is used.
        muted: nothing is noted now.
    """

    uses: dict[int, set[Use]] = field(factory=dict)
    muted: bool = False

    def use(self, weight: Weight, use: Use) -> None:
        """Note how the parameters behind a weight are used.

        What is done to the rows of a product of parameters says nothing of its right-hand factor. Axes are those of one
        of them: another one that has fewer is used over axes that are not known.
        """
        if self.muted:
            return
        last = max((*use.inputs, *use.outputs, *use.batch), default=-1)
        for param in weight.holders if use.kind in _OF_ROWS else weight.params:
            self.uses.setdefault(id(param), set()).add(use if param.dim() > last else Use(use.kind))

    def use_all(self, weights: Iterable[Weight], kind: str) -> None:
        """Note one kind of use of several weights."""
        for weight in weights:
            self.use(weight, Use(kind))

    def is_contracted(self, param: nn.Parameter) -> bool:
        """True for a parameter that a product has contracted already."""
        return any(use.kind == "contracted" for use in self.uses.get(id(param), ()))

    def rectify(self, flows: Iterable[Flow]) -> None:
        """Note that an activation as hidden features go through is taken of what projections made."""
        for piece in (piece for flow in flows for piece in flow.pieces):
            self.note_owner(piece.source.owner, "rectified")

    def note_owner(self, owner: nn.Module | nn.Parameter, kind: str) -> None:
        """Note one kind of use of the weight of a projection, or of a weight used by hand.

        Args:
            owner: the projection, or the weight.
            kind: as `Use` has it.
        """
        weight = stored_weight(owner) if isinstance(owner, nn.Module) else owner
        if weight is not None:
            self.uses.setdefault(id(weight), set()).add(Use(kind))
