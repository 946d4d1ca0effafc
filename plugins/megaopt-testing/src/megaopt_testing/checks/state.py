"""State before the first step: complete, and where the optimizer's own first step would have begun."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import requires
from typing import Any

import torch

from megaopt_core import get_registry
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_testing.long_run import LONG, built_few, step_few
from megaopt_testing.snapshot import layout, params_of, settings_of, state_of
from megaopt_testing.trial import Trial, some

__all__ = ["check_state_before_first_step"]

_LEARNER = "megaopt-bridge"


def check_state_before_first_step(optimizer: str, **settings: Any) -> None:
    """State is there as soon as an optimizer is built: a checkpoint loads without a training step first.

    It has the keys, shapes and dtypes that it has after steps; making it moves no parameter, needs no gradient, and
    does not change the steps that follow.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a step adds, drops or reshapes state or group settings, building moves a parameter or leaves a
            gradient, the first steps differ from those of the class without `init_state_fn`, or the entry tells no
            state and its distribution does not require megaopt-bridge.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    built = trial.build(model)
    moved = [
        name for name, param in model.named_parameters() if not torch.equal(param.detach(), before[name])
    ]
    if moved:
        trial.fail(f"the build moves {some(moved)}; init_state_fn must not change parameters")
    with_gradient = [name for name, param in model.named_parameters() if param.grad is not None]
    if with_gradient:
        trial.fail(f"the build leaves gradients on {some(with_gradient)}; init_state_fn must remove them")
    in_groups = [
        key
        for key, value in settings_of(built).items()
        if isinstance(value, torch.Tensor) and value.numel() > 1
    ]
    if in_groups:
        trial.fail(
            f"it keeps tensors in its groups: {some(in_groups)}. A group holds settings only; keep state in "
            "`optimizer.state[param]`"
        )
    at_first = {**layout(state_of(built)), **layout(settings_of(built))}
    for step in range(2):
        trial.step_given(model, built, step)
        _require_same_layout(
            trial, at_first, {**layout(state_of(built)), **layout(settings_of(built))}, step + 1, built
        )
    _require_same_start(trial, built)
    _require_lasting_layout(trial)
    _require_told(trial, built)


def _require_told(trial: Trial, built: MegatronOptimizer) -> None:
    """Raise where a distribution leaves its state to be learned, and does not require what learns it."""
    registry, name = get_registry(), trial.optimizer
    entry, owner = registry.optimizer(name), registry.owner("optimizer", name).distribution
    if entry.init_state_fn is not None or entry.state is not None or owner in (None, _LEARNER):
        return
    if not any(line.startswith(_LEARNER) for line in requires(owner) or ()):
        trial.fail(
            f"its entry has neither state nor init_state_fn, and {owner} does not require {_LEARNER}, which learns "
            f"states. Make the state in init_state_fn{_declaration(trial, built)}"
        )


def _require_lasting_layout(trial: Trial) -> None:
    """Take many steps of a small model: what is made or dropped late is not there to be loaded either."""
    model, built = built_few(trial)
    at_first = layout(state_of(built))
    for first in range(0, LONG, LONG // 4):
        step_few(model, built, range(first, first + LONG // 4))
        _require_same_layout(trial, at_first, layout(state_of(built)), first + LONG // 4, built)


def _require_same_layout(
    trial: Trial, first: dict[str, str], later: dict[str, str], steps: int, built: MegatronOptimizer
) -> None:
    added, dropped = [key for key in later if key not in first], [key for key in first if key not in later]
    changed = [
        f"{key} ({first[key]} → {later[key]})" for key in first if key in later and first[key] != later[key]
    ]
    told = [
        f"{what} {some(keys)}"
        for what, keys in (("adds", added), ("drops", dropped), ("changes", changed))
        if keys
    ]
    if told:
        trial.fail(
            f"by step {steps} it {'; '.join(told)}. Everything that a checkpoint needs has to be there before the "
            f"first step: make it in init_state_fn{_declaration(trial, built)}"
        )


def _declaration(trial: Trial, built: MegatronOptimizer) -> str:
    """Return how the entry would declare the state that steps have made; nothing where it has no simple kinds."""
    kinds: dict[str, set[Any]] = {}
    params: dict[str, int] = Counter()
    cls = get_registry().optimizer(trial.optimizer).load_class()
    parts = [part for part in built.parts if isinstance(part.inner, cls)]
    for part in parts:
        for tensor in part.stepped:
            for key, value in part.inner.state.get(tensor, {}).items():
                kinds.setdefault(key, set()).add(_kind(value, tensor))
                params[key] += 1
    count = sum(len(part.stepped) for part in parts)
    if (
        not kinds
        or any(len(found) > 1 or None in found for found in kinds.values())
        or {*params.values()} != {count}
    ):
        return ""
    return f", or declare it in the entry: state={ {key: next(iter(found)) for key, found in kinds.items()} }"


def _kind(value: Any, param: torch.Tensor) -> str | tuple[int, ...] | None:
    if type(value) in (int, float):
        return "number"
    if not isinstance(value, torch.Tensor):
        return None
    if value.dtype == param.dtype and value.shape == param.shape and param.dim():
        return "param"
    if value.shape == () and value.dtype == torch.float32 and value.device.type == "cpu":
        return "scalar"
    return tuple(value.shape) if value.dtype == param.dtype else None


def _require_same_start(trial: Trial, stepped: MegatronOptimizer) -> None:
    """Take the state of a second optimizer away, so that its class makes its own, and compare two steps."""
    torch.manual_seed(0)
    model = trial.model()
    lazy = trial.build(model)
    for part in lazy.parts:
        part.inner.state.clear()
    try:
        for step in range(2):
            trial.step_given(model, lazy, step)
    except (KeyError, AttributeError, IndexError):
        return  # the class needs init_state_fn: there is no other beginning to compare with
    own, made = params_of(lazy), params_of(stepped)
    different = [name for name in own if not torch.allclose(own[name], made[name], rtol=1e-5, atol=1e-7)]
    if different:
        trial.fail(
            f"the state before the first step gives other first steps than {type(stepped.parts[0].inner).__name__} "
            f"alone: {some(different)}. Give the entry an init_state_fn whose state leads to the same values"
        )
