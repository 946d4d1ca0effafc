"""Classes of packages that need one or two recipes."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from megaopt_bridge.recipe import Recipe
from megaopt_core.params import Granularity

__all__ = ["EMERGING", "HEAVYBALL", "PRODIGYOPT", "SCHEDULEFREE", "TORCHAO"]

_CLOSURE = "its step needs a closure: it evaluates the model several times a step"
_WRAPPER = "it wraps another optimizer instance: it is no optimizer class of its own"
_MATRICES = Recipe(matrices_only=True)

_AVERAGE = "its parameters are an average that moves on while the learning rate is 0"

SCHEDULEFREE: Mapping[str, Recipe] = {
    **dict.fromkeys(
        (
            "AdamWScheduleFree",
            "AdamWScheduleFreePaper",
            "AdamWScheduleFreeReference",
            "SGDScheduleFree",
            "SGDScheduleFreeReference",
        ),
        Recipe(fails={"one_schedule": _AVERAGE}),
    ),
    "RAdamScheduleFree": Recipe(
        fails={"one_schedule": _AVERAGE, "report": "it moves nothing in its first four steps"}
    ),
    **dict.fromkeys(
        ("AdamWScheduleFreeClosure", "RAdamScheduleFreeClosure", "SGDScheduleFreeClosure"),
        Recipe(refused=_CLOSURE),
    ),
    **dict.fromkeys(("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"), Recipe(refused=_WRAPPER)),
}

PRODIGYOPT: Mapping[str, Recipe] = {
    # One estimate for everything; where it begins to grow depends on the gradients.
    "Prodigy": Recipe(
        granularity=Granularity.GROUP,
        hidden=frozenset({"fsdp_in_use"}),
        fails={"one_schedule": "it takes one learning rate for all groups, and raises where they differ"},
    ),
}

_NOT_FINITE = "its decompositions do not exist for an infinite gradient"
_NORMED = "it brings weights back to their norm, for every learning rate"

EMERGING: Mapping[str, Recipe] = {
    **dict.fromkeys(("PolarGrad", "SOAP", "Scion", "SinkhornMuon"), _MATRICES),
    "Muon": evolve(_MATRICES, fails={"settings_act": "its symmetric products need a GPU"}),
    "Spel": evolve(_MATRICES, fails=dict.fromkeys(("group_settings", "one_schedule"), _NORMED)),
    **dict.fromkeys(
        ("AdaptiveMuon", "OrthogonalizedOptimizer"),
        Recipe(refused="its constructor has no defaults; megaopt-muon brings adaptive_muon and muon"),
    ),
    "MOP": Recipe(matrices_only=True, fails={"non_finite_gradients": _NOT_FINITE}),
    "REKLS": Recipe(
        matrices_only=True,
        fails=dict.fromkeys(("non_finite_gradients", "gradients_untouched"), _NOT_FINITE),
    ),
    "MuonHyperball": Recipe(matrices_only=True, fails={"one_schedule": _NORMED}),
    **dict.fromkeys(
        ("ObliqueAdam", "ObliqueSGD"),
        Recipe(fails=dict.fromkeys(("group_settings", "one_schedule"), _NORMED)),
    ),
    "PSGDPro": Recipe(matrices_only=True),
}

HEAVYBALL: Mapping[str, Recipe] = {
    **dict.fromkeys(("SAMWrapper",), Recipe(refused=_WRAPPER)),
    "SplitOpt": Recipe(refused="it is a list of other optimizers; overrides route parameters here"),
}

_OWN_TENSORS = (
    "its state is kept in tensors of a class of its own, which can be neither compared nor cut; megaopt-device keeps "
    "the states of any optimizer in 8 bits"
)

TORCHAO: Mapping[str, Recipe] = {
    **dict.fromkeys(
        ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"),
        Recipe(refused=_OWN_TENSORS),
    ),
    "CPUOffloadOptimizer": Recipe(refused=f"{_WRAPPER}; megaopt-device brings offloading"),
}
