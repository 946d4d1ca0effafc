"""Groups: each parameter is stepped with the settings of its own group, as they are when the step is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megaopt_core.errors import OverrideConflictError
from megaopt_core.optimizers import MegatronOptimizer, OptimizerPart
from megaopt_core.params import Granularity, ParamGroupOverride, ParamKey
from megaopt_core.registry import get_registry
from megaopt_testing.checks.group_defaults import require_group_defaults
from megaopt_testing.snapshot import params_of
from megaopt_testing.trial import DEFAULT_SETTINGS, Trial, some

__all__ = ["check_group_settings"]

_STEPS = 3
_MANY = 12
_DECAY = 0.5
_SMALL = 0.01
"""Of a weight, what decay takes in one step."""
_FAR = 0.1
_RATES = ("beta", "momentum")

type _Params = dict[str, torch.Tensor]


def check_group_settings(optimizer: str, **settings: Any) -> None:
    """What a group says acts on its parameters and on no others: learning rate, weight decay, decay rates.

    Half of the parameters get another value by an override. They have to move otherwise than without it, and the rest
    as without it. With another learning rate or weight decay they have to move as they do where all have that value;
    so they do without weight decay. Weight decay takes them nearer to zero. At twice the learning rate a first step
    goes twice as far, with a gradient, and where weight decay alone moves. Every other default of the class does for a
    group what it does in the constructor, and two groups with the same settings step as one.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; weight decay is this check's own.

    Raises:
        ConformanceError: an override has no effect, reaches parameters of other groups, or has another effect than the
            same value for all; weight decay makes weights larger; or a step is not proportional to the learning rate.
    """
    trial = Trial(optimizer, settings)
    lr = float(settings.get("lr", DEFAULT_SETTINGS["lr"]))
    own = trial.own_names(trial.build(trial.model()))
    target = own[: (len(own) + 1) // 2]
    is_group = get_registry().optimizer(optimizer).granularity is Granularity.GROUP
    key = ParamKey(name=tuple(target))
    # Overrides that are given replace the standard ones, so that every run is given one.
    same = {key: ParamGroupOverride(wd_mult=1.0)}
    plain, built = _run(trial, lr=lr, overrides=same)
    rest = [] if is_group else [name for name in own if name not in target]
    before = dict(trial.model().named_parameters())
    for what, override, everywhere in _variations(_part_of(built, own), lr):
        moved = _decaying(built, target) if "weight_decay" in what else target
        try:
            changed, _ = _run(trial, lr=lr, overrides={key: override})
        except OverrideConflictError:
            continue  # the entry itself says what these parameters get
        deaf = [name for name in moved if torch.equal(changed[name], plain[name])]
        if (
            everywhere is None
        ):  # at another decay rate signs of small tensors may be alike, and bases refreshed later
            deaf = [] if deaf != moved else _deaf_for_long(trial, key, override, moved, lr)
        if deaf:
            trial.fail(
                f"another {what} for their group changes nothing about {some(deaf)}. Read "
                f"`group[{what!r}]` in every step; the constructor gives only the default"
            )
        reached = _differ(rest, plain, changed, before)
        if reached:
            trial.fail(
                f"another {what} for the group of {some(target)} also changes {some(reached)}, which are in "
                "another group"
            )
        if everywhere is not None:
            expected, _ = _run(trial, overrides=same, **everywhere)
            other = _differ(moved, expected, changed, before)
            if other:
                trial.fail(
                    f"{what} set for a group moves {some(other)} to other values than the same {what} set for all"
                )
        if what == "weight_decay":
            _require_shrinking(trial, moved, plain, changed, before)
    _require_proportional(trial, own, lr)
    require_group_defaults(trial)


def _require_proportional(trial: Trial, names: list[str], lr: float) -> None:
    """Compare first steps at a learning rate and at twice of it: what a gradient does, and what weight decay does."""
    rates, decay = (lr, 2 * lr), _SMALL / lr if lr else 0.0
    by_gradient = [_first_move(trial, lr=rate, weight_decay=0.0, scale=1.0) for rate in rates]
    by_decay = []
    for rate in rates:
        less, more = (_first_move(trial, lr=rate, weight_decay=each, scale=0.0) for each in (0.0, decay))
        by_decay.append({name: more[name] - less[name] for name in more})
    for what, (once, twice) in (("the gradient", by_gradient), ("weight decay", by_decay)):
        ratios = {
            name: float(twice[name].norm() / once[name].norm()) for name in names if bool(once[name].any())
        }
        other = [name for name, ratio in ratios.items() if abs(ratio - 2) > _FAR]  # NaN is not
        if other:
            trial.fail(
                f"at twice the learning rate {what} alone moves {some(other)} {ratios[other[0]]:.3g} times "
                "as far in a first step. Multiply by the learning rate once: schedules and users rely on it"
            )


def _first_move(trial: Trial, *, scale: float, **needed: Any) -> _Params:
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model, **needed)
    before = params_of(built)
    trial.backward(model, 0)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(scale)
    built.step()
    return {name: value - before[name] for name, value in params_of(built).items()}


def _require_shrinking(
    trial: Trial, names: list[str], less: _Params, more: _Params, before: Mapping[str, torch.Tensor]
) -> None:
    """Compare two runs of which the second one decays more: all in all it ends nearer to zero."""
    away = sum(float(((more[name] - less[name]) * before[name].detach()).sum()) for name in names)
    if away > 0:
        trial.fail(
            f"more weight decay takes {some(names)} further from zero: `param.mul_(1 - lr * weight_decay)`"
        )


def _deaf_for_long(
    trial: Trial, key: ParamKey, override: ParamGroupOverride, names: list[str], lr: float
) -> list[str]:
    """Return the parameters that move alike with another setting for many steps."""
    same = {key: ParamGroupOverride(wd_mult=1.0)}
    plain, _ = _run(trial, steps=_MANY, lr=lr, overrides=same)
    changed, _ = _run(trial, steps=_MANY, lr=lr, overrides={key: override})
    return names if all(torch.equal(changed[name], plain[name]) for name in names) else []


def _part_of(built: MegatronOptimizer, own: Iterable[str]) -> OptimizerPart:
    names = set(own)
    return next(
        part for part in built.parts if names & {built.names[p] for g in part.groups for p in g["params"]}
    )


def _variations(
    part: OptimizerPart, lr: float
) -> Iterator[tuple[str, ParamGroupOverride, Mapping[str, Any] | None]]:
    """Yield what is set, for one group, and for all where the configuration can say it."""
    yield "lr", ParamGroupOverride(max_lr=2 * lr), {"lr": 2 * lr}
    if "weight_decay" in part.inner.defaults:
        yield "weight_decay", ParamGroupOverride(wd_mult=2.0), {"lr": lr, "weight_decay": 2 * _DECAY}
        yield "weight_decay of 0", ParamGroupOverride(wd_mult=0.0), {"lr": lr, "weight_decay": 0.0}
    for key, value in part.inner.defaults.items():
        if any(word in key for word in _RATES) and (other := _another_rate(value)) is not None:
            yield key, {key: other}, None  # type: ignore[misc] # a key of this optimizer


def _another_rate(value: Any) -> Any:
    """Return other decay rates in their range; None where the value is none."""
    if isinstance(value, (tuple, list)):
        rates = [_another_rate(rate) for rate in value]
        return None if not rates or None in rates else tuple(rates)
    if isinstance(value, bool) or not isinstance(value, float) or not 0.0 <= value < 1.0:
        return None
    return value / 2 if value else 0.5


def _run(
    trial: Trial, *, steps: int = _STEPS, weight_decay: float = _DECAY, **needed: Any
) -> tuple[_Params, MegatronOptimizer]:
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model, weight_decay=weight_decay, **needed)
    for step in range(steps):
        trial.step_given(model, built, step)
    return params_of(built), built


def _decaying(built: MegatronOptimizer, names: list[str]) -> list[str]:
    groups = [group for group in built.param_groups if group["weight_decay"]]
    decaying = {built.names[param] for group in groups for param in group["params"]}
    return [name for name in names if name in decaying]


def _differ(
    names: Iterable[str], wanted: _Params, found: _Params, before: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the parameters that went another way, by more than what rounding does to it."""
    return [
        name
        for name in names
        if (found[name] - wanted[name]).norm() > 1e-3 * (wanted[name] - before[name]).norm()
    ]
