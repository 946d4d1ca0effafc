"""The author's own formula as a check: what no kit can know by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.check import Check
from megaopt_testing.checks.settings import own_settings
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial

__all__ = ["formula_check"]

_SCALES = (1.0, 10.0, None, 0.1, None, 3.0, 1.0)
"""By what gradients are multiplied in each step; None: half of the parameters get none."""
_CLOSE = 1e-4

type Formula = Callable[..., torch.Tensor]


def formula_check(formula: Formula) -> Check:
    """Return a check that steps are those of a formula, computed in float64.

    A kit can say that an optimizer is heard, repeats itself and survives sharding. Whether its decay rates are in the
    right places, or weights decay before or after the step, only its paper knows: this check holds it to that.

    Args:
        formula: called for every parameter that the optimizer takes, with its values at the start, float64; the list
            of its gradients, float64, None for a step in which it has none; and by keyword `lr`, `weight_decay` and
            every setting of the entry by its short name. Returns the values after the steps.

    Example:
        >>> def sign_descent(start, grads, *, lr, weight_decay):
        ...     for grad in grads:
        ...         if grad is not None:
        ...             start = start * (1 - lr * weight_decay) - lr * grad.sign()
        ...     return start
        >>> formula_check(sign_descent).id
        'formula'

        ``parametrize_with_checks("mine", checks=[*CHECKS, formula_check(sign_descent)])`` makes it with all others.
    """
    return Check(
        "formula",
        "steps are those of the author's formula in float64",
        partial(_check, formula),
        hint="compare the first step by hand: corrections of averages, decay before or after, which rate is where",
    )


def _check(formula: Formula, optimizer: str, **settings: Any) -> None:
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    lr = float(settings.get("lr", DEFAULT_SETTINGS["lr"]))
    built = trial.build(model, weight_decay=settings.get("weight_decay", 0.1 / lr if lr else 0.0))
    own = trial.own_names(built)
    params = dict(model.named_parameters())
    start = {name: params[name].detach().double() for name in own}
    grads: dict[str, list[torch.Tensor | None]] = {name: [] for name in own}
    for step, scale in enumerate(_SCALES):
        built.zero_grad()
        trial.backward(model, step)
        for index, name in enumerate(own):
            if scale is None and index % 2:
                params[name].grad = None
            elif scale is not None:
                params[name].grad.mul_(scale)  # type: ignore[union-attr] # backward gave one
            grad = params[name].grad
            grads[name].append(None if grad is None else grad.double())
        built.step()
    given = {info.field.name: getattr(built.config, key) for key, info in own_settings(optimizer).items()}
    for name in own:
        expected = formula(start[name], grads[name], **_group_of(built, name), **given)
        found = params[name].detach().double()
        far = (found - expected).norm() / (expected - start[name]).norm().clamp_min(1e-30)
        if not far <= _CLOSE:
            trial.fail(
                f"{name} ends at a distance of {float(far):.2g} of its way from the end of the formula, "
                f"after {len(_SCALES)} steps (some without a gradient)"
            )


def _group_of(built: MegatronOptimizer, name: str) -> dict[str, float]:
    group = next(
        group for group in built.param_groups if any(built.names[param] == name for param in group["params"])
    )
    return {key: float(group[key]) for key in ("lr", "weight_decay")}
