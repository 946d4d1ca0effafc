"""Classes of torch.optim."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_bridge.recipe import Recipe

__all__ = ["TORCH"]

TORCH: Mapping[str, Recipe] = {
    "LBFGS": Recipe(refused="its step needs a closure: it evaluates the model several times a step"),
    "SparseAdam": Recipe(refused="it takes sparse gradients only, and megaopt collects dense ones"),
    "Muon": Recipe(matrices_only=True),
    "ASGD": Recipe(
        fails={
            "one_schedule": "a step's rate is computed at the end of the step before",
            "settings_act": "t0 bends the average `ax` in its state, which nothing reads",
        }
    ),
    "Rprop": Recipe(fails={"one_schedule": "the learning rate is only where its step sizes begin"}),
}
