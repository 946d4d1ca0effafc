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

    Args:
        kind: `contracted`, `factor` (of a product of parameters), `generated` (a batch of vectors in one), `indexed`
            (by what the caller passed), `looked_up` (by something fixed), `sliced`, `cropped` (sliced along all of
            `inputs`), `expanded`, `fixed` (contracted with something fixed), `depthwise`, `elementwise`, `beside` (laid
            beside activations), `grouped` (each entry meets a group of entries of something fixed), `modulated` (a
            kernel that is scaled, for each sample), `returned`, `padded` (the result of its product), `attending` (that
            goes through a softmax over what it met, or chosen among by one, or handed to attention), `choosing` (a
            softmax is taken of what several products make), `paired` (two parts of what its product makes multiply each
            other), `gating` (several bounded parts of that multiply others), `rectified` (a ReLU or the like is taken
            of it), `noise` (it scales noise that is added to a weight), `mixing` (it holds coefficients of a mixture of
            matrices), `penalized` (one number is made of it, and of no activation: a penalty), `softened` (a softmax is
            taken of it), `measured` (its largest entry or norm scales what it meets), `ranked` (what the product of a
            stack makes), `row` (one row of it meets an activation) or `passed` (to something that cannot be read).
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


_OF_ROWS = ("indexed", "looked_up", "sliced", "fixed", "elementwise", "beside")


@define(eq=False, slots=False)
class UseNotes:
    """How one evaluation has seen parameters used.

    Args:
        uses: how each parameter, by identity, is used.
    """

    uses: dict[int, set[Use]] = field(factory=dict)

    def use(self, weight: Weight, use: Use) -> None:
        """Note how the parameters behind a weight are used.

        What is done to the rows of a product of parameters says nothing of its right-hand factor.
        """
        for param in weight.holders if use.kind in _OF_ROWS else weight.params:
            self.uses.setdefault(id(param), set()).add(use)

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
