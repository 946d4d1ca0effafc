"""What a parameter is that several modules share."""

from __future__ import annotations

from megaopt_core.params._roles import Role, RoleDecision
from megaopt_core.routing._roles.decisions import embedding

__all__ = ["tied_role"]


def tied_role(found: list[RoleDecision]) -> RoleDecision:
    """Return the decision for a parameter from those of all its places."""
    roles = {decision.role for decision in found}
    if Role.EMBEDDING in roles:
        first = next(decision for decision in found if decision.role is Role.EMBEDDING)
        return embedding(f"{first.reason}, tied to the output head") if len(roles) > 1 else first
    for role in (Role.OUTPUT, Role.MATRIX):
        if role in roles:
            return next(decision for decision in found if decision.role is role)
    return found[0]
