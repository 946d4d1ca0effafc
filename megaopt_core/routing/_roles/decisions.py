"""Short constructors for decisions."""

from __future__ import annotations

from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.params._views import MATRIX, MatrixView

__all__ = ["elementwise", "embedding", "matrix", "output"]


def embedding(reason: str, *, uncertain: bool = False) -> RoleDecision:
    """Return the decision that a parameter is an embedding."""
    return RoleDecision(Role.EMBEDDING, reason, uncertain=uncertain)


def output(reason: str, *, uncertain: bool = False) -> RoleDecision:
    """Return the decision that a parameter is an output head."""
    return RoleDecision(Role.OUTPUT, reason, uncertain=uncertain)


def elementwise(reason: str, *, uncertain: bool = False) -> RoleDecision:
    """Return the decision that a parameter is element-wise."""
    return RoleDecision(Role.ELEMENTWISE, reason, uncertain=uncertain)


def matrix(reason: str, view: MatrixView = MATRIX, *, uncertain: bool = False) -> RoleDecision:
    """Return the decision that a parameter is a matrix, seen through a view."""
    return RoleDecision(Role.MATRIX, reason, view=view, uncertain=uncertain)
