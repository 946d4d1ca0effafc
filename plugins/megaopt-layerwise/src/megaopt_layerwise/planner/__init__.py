"""Who owns which matrix: pure functions from shapes, costs, groups and world to owners."""

from megaopt_layerwise.planner.cost_model import CostModel
from megaopt_layerwise.planner.dealing import ping_pong
from megaopt_layerwise.planner.owners import OwnerPolicy, plan_owners
from megaopt_layerwise.planner.plan import Division, OwnerPlan, Owners
from megaopt_layerwise.planner.works import Carried, Work, peer_dim, work_of

__all__ = [
    "Carried",
    "CostModel",
    "Division",
    "OwnerPlan",
    "OwnerPolicy",
    "Owners",
    "Work",
    "peer_dim",
    "ping_pong",
    "plan_owners",
    "work_of",
]
