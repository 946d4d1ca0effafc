"""Classes of pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Mapping

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

_ONE_RATE = Recipe(granularity=Granularity.GROUP)
"""It estimates one learning rate for everything; where the estimate begins to grow depends on the gradients."""

PYTORCH_OPTIMIZER: Mapping[str, Recipe] = {
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), Recipe(refused=_MODEL)),
    **dict.fromkeys(("AliG", "BSAM", "LBFGS"), Recipe(refused=_CLOSURE)),
    **dict.fromkeys(("FriendlySAM", "GSAM", "LookSAM", "SAM", "WSAM"), Recipe(refused=_CLOSURE)),
    **dict.fromkeys(("AdaHessian", "SophiaH"), Recipe(refused=_HESSIAN)),
    **dict.fromkeys(("Lookahead", "ScheduleFreeWrapper", "TRAC"), Recipe(refused=_WRAPPER)),
    **dict.fromkeys(("AdaGO", "AdaMuon", "Muon", "NorMuon"), _MUON),
    **dict.fromkeys(
        ("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy"), _ONE_RATE
    ),
    "DistributedMuon": Recipe(
        refused="it shares its work out over ranks itself: po:Muon is the same without"
    ),
    "LoRARite": Recipe(refused="it needs pairs of LoRA factors, which no parameter by itself tells"),
    "MuonClip": Recipe(refused="it needs the attention's largest logits, which the model has to give"),
    "Ranger21": Recipe(refused="its constructor needs 'num_iterations': it brings schedules of its own"),
}
