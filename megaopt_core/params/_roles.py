"""What a parameter is: embedding, output head, matrix, or element-wise; found from the module that owns it."""

from __future__ import annotations

from enum import StrEnum

from attrs import evolve, field, frozen

from megaopt_core.params._views import MATRIX, MatrixView

__all__ = ["Doubt", "Role", "RoleDecision"]


class Role(StrEnum):
    """What a parameter is, as far as the choice of an optimizer goes.

    `EMBEDDING`: a table that is indexed. `OUTPUT`: the head that produces the model's output. `MATRIX`: a hidden
    weight that is contracted with activations; it has a :class:`MatrixView`. `ELEMENTWISE`: everything else: biases,
    norms, gains, scalars, positional tables, tokens, depthwise convolutions.
    """

    EMBEDDING = "embedding"
    OUTPUT = "output"
    MATRIX = "matrix"
    ELEMENTWISE = "elementwise"

    @property
    def is_embedding_or_output(self) -> bool:
        """True for the model's first and last layer."""
        return self in (Role.EMBEDDING, Role.OUTPUT)


class Doubt(StrEnum):
    """What about a decision is a guess.

    `NONE`: every step to it was certain. `LAYOUT`: it is a matrix, but which matrices lie inside it is not known; it
    is seen as one. `ROLE`: it may be something else; a matrix optimizer leaves it to its fallback.
    """

    NONE = "none"
    LAYOUT = "layout"
    ROLE = "role"

    @property
    def settled_by(self) -> str:
        """The attribute of the parameter that settles it; empty where there is nothing to settle."""
        return {Doubt.NONE: "", Doubt.LAYOUT: "matrix_view", Doubt.ROLE: "use_muon"}[self]


@frozen
class RoleDecision:
    """A role with its reason.

    Args:
        role: what the parameter is; the best guess where that is doubtful.
        reason: why, in words that a user can check against the model.
        view: how it is seen as matrices; None unless the role is `MATRIX`.
        doubt: what about it is a guess; reports say so.
        unread: nothing that reads models was there, and it would know more.
        reader: distribution and version of the plugin that read it from the model; empty: none did.
        no_forward: why the one forward that was to show it could not be run; empty: it ran, or none was to run.

    Example:
        >>> RoleDecision(Role.OUTPUT, "no forward calls it", doubt=Doubt.ROLE).uncertain
        True
    """

    role: Role
    reason: str
    view: MatrixView | None = None
    doubt: Doubt = Doubt.NONE
    unread: bool = False
    reader: str = field(default="", eq=False)
    no_forward: str = field(default="", eq=False)

    @classmethod
    def embedding(cls, reason: str) -> RoleDecision:
        """Return the decision that a parameter is an embedding.

        Args:
            reason: why.
        """
        return cls(Role.EMBEDDING, reason)

    @classmethod
    def output(cls, reason: str) -> RoleDecision:
        """Return the decision that a parameter is an output head.

        Args:
            reason: why.
        """
        return cls(Role.OUTPUT, reason)

    @classmethod
    def elementwise(cls, reason: str) -> RoleDecision:
        """Return the decision that a parameter is element-wise.

        Args:
            reason: why.
        """
        return cls(Role.ELEMENTWISE, reason)

    @classmethod
    def matrix(cls, reason: str, view: MatrixView = MATRIX) -> RoleDecision:
        """Return the decision that a parameter is a hidden matrix.

        Args:
            reason: why.
            view: how it is seen as matrices.
        """
        return cls(Role.MATRIX, reason, view=view)

    @property
    def uncertain(self) -> bool:
        """True when any of it is a guess."""
        return self.doubt is not Doubt.NONE

    def doubted(self, why: str = "", doubt: Doubt = Doubt.ROLE) -> RoleDecision:
        """Return the decision with a doubt about it.

        Args:
            why: what speaks against it; added to the reason.
            doubt: what is doubtful; a doubt about the role is never weakened to one about the layout.

        Example:
            >>> RoleDecision.matrix("weight of Linear").doubted("no layer takes its output").reason
            'weight of Linear; no layer takes its output'
        """
        reason = f"{self.reason}; {why}" if why else self.reason
        kept = Doubt.ROLE if Doubt.ROLE in (self.doubt, doubt) else doubt
        return evolve(self, reason=reason, doubt=kept)
