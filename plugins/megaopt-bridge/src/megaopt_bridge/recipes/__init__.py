"""What is to be known about single classes, one file a source; most classes need nothing here."""

from __future__ import annotations

from collections.abc import Mapping

from megaopt_bridge.recipe import Recipe
from megaopt_bridge.recipes.others import EMERGING, HEAVYBALL, PRODIGYOPT, SCHEDULEFREE, TORCHAO
from megaopt_bridge.recipes.pytorch_optimizer import PYTORCH_OPTIMIZER
from megaopt_bridge.recipes.torch_optim import TORCH

__all__ = ["RECIPES", "recipe_of"]

RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "emerging": EMERGING,
    "heavyball": HEAVYBALL,
    "po": PYTORCH_OPTIMIZER,
    "prodigyopt": PRODIGYOPT,
    "schedulefree": SCHEDULEFREE,
    "torch": TORCH,
    "torchao": TORCHAO,
}
"""Source to class name to recipe."""


def recipe_of(source: str, class_name: str) -> Recipe:
    """Return the recipe of a class; an empty one for those that need none.

    Args:
        source: where it comes from.
        class_name: the class.

    Example:
        >>> recipe_of("torch", "LBFGS").refused
        'its step needs a closure: it evaluates the model several times a step'
    """
    return RECIPES.get(source, {}).get(class_name, Recipe())
