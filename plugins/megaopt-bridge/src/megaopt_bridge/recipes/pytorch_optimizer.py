"""Classes of pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from megaopt_bridge.recipe import Recipe
from megaopt_core.params import Granularity

__all__ = ["PYTORCH_OPTIMIZER"]

_MODEL = "it needs the model: it steps while gradients are computed, or reads the names of modules"
_CLOSURE = "its step needs a closure: it evaluates the model again, or reads the loss"
_HESSIAN = (
    "it needs a backward pass with create_graph=True for its Hessian, and megaopt collects plain gradients"
)
_WRAPPER = "it wraps another optimizer instance: it is no optimizer class of its own"

_BESIDE_MUON = frozenset({"adamw_lr", "adamw_betas", "adamw_wd", "adamw_eps"})
_MUON = Recipe(matrices_only=True, groups={"use_muon": True}, hidden=_BESIDE_MUON)
"""What it would step by its own AdamW goes to the fallback, with settings and reports of its own."""

_LOST = "it keeps state that belongs to no parameter, which a checkpoint of parameters' state leaves out"
_GENERATOR = (
    "it keeps an object, or a random generator, in its state, which is compared and unpickled as itself"
)
_RANDOM = "it begins with random numbers: two models draw different ones"
_AVERAGE = "its parameters are an average that moves on while the learning rate is 0"
_PAST = "past learning rates are in its momentum or its averages, and go on"
_ATTRIBUTE = "it remembers steps in an attribute of its own, which no checkpoint holds"
_DIVIDES = "its first momentum is random, of a size that it divides by the learning rate"
_NO_RATE = "its step sizes are not those of the learning rate"
_SLOW = "its first steps are too small to change an fp32 weight"
_LATER = "its first step makes settings of the group that cannot be given beforehand"

_VIEWED = "it views parameters as vectors, which those of another order in memory refuse"
_WRITES = "it writes its own arithmetic into gradients"

_OBJECTS = dict.fromkeys(
    (
        "gradient_accumulation",
        "bit_exact_resume",
        "non_finite_gradients",
        "tied_parameters",
        "deterministic",
    ),
    _GENERATOR,
)

# D-adaptation estimates one rate for everything; where the estimate begins to grow depends on the gradients.
PYTORCH_OPTIMIZER: Mapping[str, Recipe] = {
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), Recipe(refused=_MODEL)),
    **dict.fromkeys(("AliG", "BSAM", "LBFGS"), Recipe(refused=_CLOSURE)),
    **dict.fromkeys(("FriendlySAM", "GSAM", "LookSAM", "SAM", "WSAM"), Recipe(refused=_CLOSURE)),
    **dict.fromkeys(("AdaHessian", "SophiaH"), Recipe(refused=_HESSIAN)),
    **dict.fromkeys(
        ("Lookahead", "OrthoGrad", "PCGrad", "SafeFP16Optimizer", "ScheduleFreeWrapper", "TRAC"),
        Recipe(refused=_WRAPPER),
    ),
    **dict.fromkeys(("Muon", "NorMuon"), _MUON),
    "AdaMuon": evolve(_MUON, fails={"strides": _VIEWED}),
    "AdamP": Recipe(fails={"strides": _VIEWED}),
    "Adalite": Recipe(fails={"gradients_untouched": _WRITES}),
    "AdaGO": evolve(_MUON, fails={"one_schedule": "its step sizes have a lower bound"}),
    "DAdaptAdaGrad": Recipe(granularity=Granularity.GROUP, fails={"one_schedule": _PAST, "report": _SLOW}),
    "DAdaptAdam": Recipe(granularity=Granularity.GROUP, fails={"one_schedule": _PAST}),
    "DAdaptAdan": Recipe(granularity=Granularity.GROUP, fails={"one_schedule": _PAST, "report": _SLOW}),
    "DAdaptLion": Recipe(granularity=Granularity.GROUP, fails={"report": _SLOW}),
    "DAdaptSGD": Recipe(granularity=Granularity.GROUP, fails={"one_schedule": _PAST, "report": _SLOW}),
    "Prodigy": Recipe(granularity=Granularity.GROUP),
    **dict.fromkeys(("ApolloDQN", "FTRL"), Recipe(fails={"one_schedule": _NO_RATE})),
    "A2Grad": Recipe(fails=dict.fromkeys(("group_settings", "one_schedule"), _NO_RATE)),
    "AccSGD": Recipe(fails={"gradients_untouched": _WRITES, "one_schedule": _NO_RATE}),
    "AdaFactor": Recipe(
        fails=dict.fromkeys(("group_settings", "one_schedule"), _NO_RATE)
        | {"state_dtypes": "its momentum is bf16 unless momentum_dtype says otherwise"}
    ),
    **dict.fromkeys(
        ("SRMM", "ScheduleFreeAdamW", "ScheduleFreeSGD"), Recipe(fails={"one_schedule": _AVERAGE})
    ),
    **dict.fromkeys(("AdaShift", "Conda", "ScalableShampoo"), Recipe(fails=_OBJECTS)),
    "ScheduleFreeRAdam": Recipe(fails={"one_schedule": _AVERAGE, "report": _SLOW}),
    "ASGD": Recipe(
        fails=dict.fromkeys(("bit_exact_resume", "one_schedule"), "it divides by the learning rate")
        | {"state_before_first_step": _LATER}
    ),
    "AvaGrad": Recipe(fails={"state_before_first_step": _LATER}),
    "Gravity": Recipe(
        fails={
            "bit_exact_resume": _DIVIDES,
            "one_schedule": _RANDOM,
        }
    ),
    "LaProp": Recipe(fails={"one_schedule": _PAST}),
    "MADGRAD": Recipe(fails={"bit_exact_resume": _LOST, "one_schedule": _AVERAGE}),
    "Magma": Recipe(
        fails={
            "bit_exact_resume": _ATTRIBUTE,
            "report": "it leaves out half of the blocks, by chance",
        }
    ),
    "Nero": Recipe(fails={"one_schedule": "it brings every row back to norm 1, for every learning rate"}),
    "RAdam": Recipe(fails={"report": "it moves nothing in its first five steps"}),
    "StableSPAM": Recipe(fails={"bit_exact_resume": _ATTRIBUTE}),
    "Shampoo": Recipe(
        fails={"non_finite_gradients": "its singular values do not exist for an infinite gradient"}
    ),
    "StableAdamW": Recipe(same_as="torch.optim:AdamW"),
    "DistributedMuon": Recipe(
        refused="it shares its work out over ranks itself: po:Muon is the same without"
    ),
    "LoRARite": Recipe(refused="it needs pairs of LoRA factors, which no parameter by itself tells"),
    "MuonClip": Recipe(refused="it needs the attention's largest logits, which the model has to give"),
    "Ranger21": Recipe(refused="its constructor needs 'num_iterations': it brings schedules of its own"),
}
