"""What a parameter is: embedding, output head, matrix, or element-wise; found from the module that owns it."""

from __future__ import annotations

from enum import StrEnum

from attrs import frozen

from megaopt_core.params._views import MatrixView

__all__ = ["Role", "RoleDecision"]


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


@frozen
class RoleDecision:
    """A role with its reason.

    Args:
        role: what the parameter is.
        reason: why, in words that a user can check against the model.
        view: how it is seen as matrices; None unless the role is `MATRIX`.
        uncertain: the decision rests on a guess; reports say so.
        unread: nothing that reads models was there, and it would know more.
    """

    role: Role
    reason: str
    view: MatrixView | None = None
    uncertain: bool = False
    unread: bool = False
