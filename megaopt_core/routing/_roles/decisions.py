"""Short constructors for decisions."""

from __future__ import annotations

from attrs import evolve

from megaopt_core.params._roles import Doubt, Role, RoleDecision
from megaopt_core.params._views import MATRIX, MatrixView

__all__ = ["doubted", "elementwise", "embedding", "matrix", "output", "settleable"]


def embedding(reason: str) -> RoleDecision:
    """Return the decision that a parameter is an embedding."""
    return RoleDecision(Role.EMBEDDING, reason)


def output(reason: str) -> RoleDecision:
    """Return the decision that a parameter is an output head."""
    return RoleDecision(Role.OUTPUT, reason)


def elementwise(reason: str) -> RoleDecision:
    """Return the decision that a parameter is element-wise."""
    return RoleDecision(Role.ELEMENTWISE, reason)


def matrix(reason: str, view: MatrixView = MATRIX) -> RoleDecision:
    """Return the decision that a parameter is a matrix, seen through a view."""
    return RoleDecision(Role.MATRIX, reason, view=view)


def doubted(decision: RoleDecision, why: str = "", doubt: Doubt = Doubt.ROLE) -> RoleDecision:
    """Return a decision with a doubt about it.

    Args:
        decision: what was found.
        why: what speaks against it; added to the reason.
        doubt: what is doubtful; a doubt about the role is never weakened to one about the layout.
    """
    reason = f"{decision.reason}; {why}" if why else decision.reason
    kept = Doubt.ROLE if Doubt.ROLE in (decision.doubt, doubt) else doubt
    return evolve(decision, reason=reason, doubt=kept)


def settleable(decision: RoleDecision) -> RoleDecision:
    """Return a decision whose reason names the attribute that settles what is doubtful about it."""
    if not decision.uncertain:
        return decision
    how = f"its attribute {decision.doubt.settled_by} settles this"
    return evolve(decision, reason=f"{decision.reason}; {how}")
