"""Who steps: the optimizer that was asked for and no stand-in, on every parameter that it takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from megaopt_core.config import constructor_kwargs
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.registry import get_registry
from megaopt_testing.long_run import LONG, built_few, step_few
from megaopt_testing.snapshot import params_of, same_bits
from megaopt_testing.trial import Trial, some

__all__ = ["check_no_silent_fallback", "check_report"]

_STEPS = 3
_TINY = 1e-6
_STAND_INS: tuple[tuple[str, type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    ("plain SGD", torch.optim.SGD, {}),
    ("SGD with momentum 0.9", torch.optim.SGD, {"momentum": 0.9}),
    ("AdamW", torch.optim.AdamW, {"weight_decay": 0.0}),
)


def check_no_silent_fallback(optimizer: str, **settings: Any) -> None:
    """It steps every parameter that it takes in its own way: not as plain SGD, SGD with momentum, or AdamW would.

    Parameters that it refuses (`accepts`) go to its `fallback` and are not looked at. An entry whose `optimizer_cls` is
    one of torch.optim's own classes says by that what it is: it has to equal that class bit for bit. One whose
    `same_as` names a stand-in shares its steps openly, and is held to the others alone; some parameter has to move so.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration; weight decay is switched off.

    Raises:
        ConformanceError: a parameter moves as a stand-in would move it, torch's class otherwise than by itself, or none
            as the class that `same_as` names.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model, weight_decay=0.0)
    names = trial.own_names(built)
    before = params_of(built)
    for step in range(_STEPS):
        trial.step_given(model, built, step)
    after = params_of(built)
    entry = get_registry().optimizer(optimizer)
    if entry.load_class().__module__.partition(".")[0] == "torch":
        _require_equal(trial, entry, built, after)
        return
    named = [stand_in for stand_in in _STAND_INS if entry.same_as == f"torch.optim:{stand_in[1].__name__}"]
    if named:
        _require_shared(trial, entry, built, before, after, named[0][1])
    for what, optimizer_cls, arguments in _STAND_INS:
        if named and optimizer_cls is named[0][1]:
            continue
        other = _stepped_by(trial, optimizer_cls, {"lr": _lr(built), **arguments})
        same = [name for name in names if _same_step(before[name], after[name], other[name])]
        if same:
            trial.fail(
                f"it moves {some(same)} as {what} with its learning rate does. If it cannot step such "
                "parameters, refuse them in `accepts` and name a `fallback`, so that reports show who steps "
                "them. If it shares its first steps with that optimizer, declare `same_as`"
            )


def _require_shared(
    trial: Trial,
    entry: OptimizerEntry,
    built: MegatronOptimizer,
    before: dict[str, torch.Tensor],
    after: dict[str, torch.Tensor],
    shared: type[torch.optim.Optimizer],
) -> None:
    """Look for a parameter that moves as the class that `same_as` names, with its own settings or the usual ones."""
    own = constructor_kwargs(entry, built.config, [trial.model()])
    known = inspect.signature(shared).parameters.keys() - {"lr", "weight_decay"}
    with_own = {key: value for key, value in own.items() if key in known}
    usual = [arguments for _, cls, arguments in _STAND_INS if cls is shared]
    for arguments in (with_own, {}, *usual):
        given = {"lr": _lr(built), "weight_decay": 0.0, **arguments}
        try:
            other = _stepped_by(trial, shared, given)
        except (TypeError, ValueError):
            continue  # arguments of the same name that mean something else
        if any(_same_step(before[name], after[name], other[name]) for name in trial.own_names(built)):
            return
    trial.fail(
        f"it declares same_as={entry.same_as!r}, but its first {_STEPS} steps move no parameter as "
        f"{shared.__name__} does. Declare `same_as` only for shared steps"
    )


def _lr(built: MegatronOptimizer) -> float:
    return float(built.param_groups[0]["lr"])


def _stepped_by(
    trial: Trial, optimizer_cls: type[torch.optim.Optimizer], arguments: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return a model's parameters after the same gradients and another optimizer."""
    model = trial.model()
    other = optimizer_cls(model.parameters(), **arguments)
    for step in range(_STEPS):
        other.zero_grad()
        trial.backward(model, step)
        other.step()
    return _named(model)


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def _same_step(before: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare the ways that two optimizers went; a difference below a thousandth is rounding."""
    moved = (theirs - before).norm()
    return bool(moved > 0) and bool((ours - theirs).norm() <= 1e-3 * moved)


def _require_equal(
    trial: Trial, entry: OptimizerEntry, built: MegatronOptimizer, after: dict[str, torch.Tensor]
) -> None:
    model = trial.model()
    params = dict(model.named_parameters())
    kwargs = constructor_kwargs(entry, built.config, [model])
    own = [group for part in built.parts if type(part.inner) is entry.load_class() for group in part.groups]
    groups = [
        {
            **{key: value for key, value in group.items() if key in ("lr", "weight_decay")},
            "params": [params[built.names[param]] for param in group["params"]],
        }
        for group in own
    ]
    by_itself = entry.load_class()(groups, **kwargs)
    for step in range(_STEPS):
        by_itself.zero_grad()
        trial.backward(model, step)
        by_itself.step()
    alone = _named(model)
    names = trial.own_names(built)
    different = [name for name in names if not same_bits(alone[name], after[name])]
    if different:
        trial.fail(
            f"its entry is torch's {entry.load_class().__name__}, but it moves {some(different)} to other values"
        )


def check_report(optimizer: str, **settings: Any) -> None:
    """`report()` names every parameter once, and `report(after_step=True)` proves that a step changed all of them.

    So does the step after it, the hundred and twentieth, and one with tiny gradients.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a parameter is not in the report, or a step leaves a parameter with a gradient as it was.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    built = trial.build(model)
    trial.own_names(built)
    listed = [row.name for row in built.report().params]
    missing = [name for name, _ in model.named_parameters() if listed.count(name) != 1]
    if missing:
        trial.fail(f"the report does not list these parameters exactly once: {some(missing)}")
    built.record_changes(exact=True)
    for step in range(_STEPS - 1):
        trial.step_given(model, built, step)
    for step in range(_STEPS, _STEPS + 2):
        before = params_of(built)
        trial.step_given(model, built, step)
        unmoved = [name for name, value in params_of(built).items() if same_bits(value, before[name])]
        if unmoved:
            trial.fail(f"a step with non-zero gradients does not change {some(unmoved)}")
    for row in built.report(after_step=True).parts:
        if row.changed != row.stepped:
            trial.fail(
                f"report(after_step=True) counts {row.changed} of {row.stepped} tensors of {row.optimizer!r} "
                "as changed"
            )
    _require_tiny(trial)
    _require_lasting(trial)


def _require_tiny(trial: Trial) -> None:
    """Step parameters of zeros, where no rounding takes a small step away, with gradients of usual and of tiny size."""
    moved = []
    for size in (1.0, _TINY):
        model, built = built_few(trial)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        built.reload_model_params()
        for step in range(_STEPS):
            chance = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = size * torch.randn(param.shape, generator=chance)
            built.step()
        moved.append({name for name, param in trial.own_params(built).items() if bool(param.detach().any())})
    left = sorted(moved[0] - moved[1])
    if left:
        trial.fail(
            f"gradients of size {_TINY:g} do not move {some(left)}, but those of size 1 do. Make the step "
            "for every size of gradient; a run with another loss scale has such gradients"
        )


def _require_lasting(trial: Trial) -> None:
    """Take many steps of a small model, whose last two move all that the first one moves."""
    model, built = built_few(trial)
    before = params_of(built)
    step_few(model, built, range(1))
    moving = [name for name, value in params_of(built).items() if not same_bits(value, before[name])]
    step_few(model, built, range(1, LONG - 2))
    for step in (LONG - 2, LONG - 1):
        before = params_of(built)
        step_few(model, built, [step])
        after = params_of(built)
        unmoved = [name for name in moving if same_bits(after[name], before[name])]
        if unmoved:
            trial.fail(
                f"step {step + 1} does not change {some(unmoved)}, but the first step does: does the "
                "optimizer stop, or step only every other time?"
            )
