"""Classes of packages that need one or two recipes."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_bridge.recipe import Recipe
from megaopt_core.params import Granularity

__all__ = ["EMERGING", "HEAVYBALL", "PRODIGYOPT", "SCHEDULEFREE"]

_CLOSURE = "its step needs a closure: it evaluates the model several times a step"
_WRAPPER = "it wraps another optimizer instance: it is no optimizer class of its own"
_MATRICES = Recipe(matrices_only=True)

SCHEDULEFREE: Mapping[str, Recipe] = {
    **dict.fromkeys(
        ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"),
        Recipe(refused=_CLOSURE),
    ),
    **dict.fromkeys(("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"), Recipe(refused=_WRAPPER)),
}

PRODIGYOPT: Mapping[str, Recipe] = {
    # One estimate for everything; where it begins to grow depends on the gradients.
    "Prodigy": Recipe(granularity=Granularity.GROUP, hidden=frozenset({"fsdp_in_use"})),
}

EMERGING: Mapping[str, Recipe] = dict.fromkeys(
    (
        "AdaptiveMuon",
        "MOP",
        "Muon",
        "MuonHyperball",
        "OrthogonalizedOptimizer",
        "PSGDPro",
        "PolarGrad",
        "REKLS",
        "SOAP",
        "Scion",
        "SinkhornMuon",
        "Spel",
    ),
    _MATRICES,
)

HEAVYBALL: Mapping[str, Recipe] = {
    **dict.fromkeys(("SAMWrapper",), Recipe(refused=_WRAPPER)),
    "SplitOpt": Recipe(refused="it is a list of other optimizers; overrides route parameters here"),
}
