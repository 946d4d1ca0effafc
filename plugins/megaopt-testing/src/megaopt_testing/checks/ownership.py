"""Which parameters a step reaches: each once, and only those that train."""

from __future__ import annotations

from typing import Any

import torch

from megaopt_core.params import Granularity
from megaopt_core.registry import get_registry
from megaopt_testing.models import SharedBlocks
from megaopt_testing.snapshot import differences, params_of, same_bits, snapshot, state_of
from megaopt_testing.trial import Trial, some

__all__ = ["check_frozen_parameters", "check_tied_parameters"]

_FROZEN = ("embedding.weight", "blocks.0.out.weight", "blocks.0.norm_mlp.weight", "blocks.1.up.bias")
_FROZEN_LATER = ("blocks.1.out.weight", "blocks.1.norm_mlp.bias")


def check_tied_parameters(optimizer: str, **settings: Any) -> None:
    """A parameter that two modules share is listed once and stepped once.

    A model whose hidden layer is registered under two names is stepped as the same model that registers it once.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a tied parameter is listed twice, or its step differs from that of one registration.
    """
    trial = Trial(optimizer, settings)
    tied = trial.build(trial.model(tied=True))
    listed = tied.get_parameters()
    twice = sorted({tied.names[param] for param in listed if sum(param is other for other in listed) > 1})
    if twice:
        trial.fail(f"tied parameters are in its groups more than once: {some(twice)}")
    results = []
    for registered_twice in (False, True):
        model = SharedBlocks(tied=registered_twice)
        weights = _weights()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        torch.manual_seed(0)  # only now: the two models have drawn different numbers of weights
        built = trial.build(model)
        for step in range(3):
            trial.step_given(model, built, step)
        results.append(snapshot(built))
    different = differences(*results)
    if different:
        trial.fail(
            f"a layer under two names gets another step than a layer under one: {some(different)} differ. "
            "Step only the parameters of the groups, which hold each tensor once"
        )


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = SharedBlocks(tied=False).state_dict()
    weights = {name: torch.randn(value.shape, generator=generator) for name, value in state.items()}
    return {**weights, "second.weight": weights["first.weight"], "second.bias": weights["first.bias"]}


def check_frozen_parameters(optimizer: str, **settings: Any) -> None:
    """Parameters that do not train keep their bits and have no state; those without a gradient keep bits and state.

    Some are frozen when the optimizer is built, some after its first step.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: such a parameter is in a group, has state, or changes, or its state does.
    """
    trial = Trial(optimizer, settings)
    torch.manual_seed(0)
    model = trial.model()
    named = dict(model.named_parameters())
    for name in _FROZEN:
        named[name].requires_grad_(False)  # noqa: FBT003 - torch takes no name
    before = {name: param.detach().clone() for name, param in named.items()}
    built = trial.build(model)
    owned = [name for name in _FROZEN if name in built.names.values() or named[name] in built.state]
    if owned:
        trial.fail(f"frozen parameters are stepped, or have state: {some(owned)}")
    for step in range(2):
        trial.step_given(model, built, step)
    moved = [name for name in _FROZEN if not same_bits(before[name], named[name].detach())]
    if moved:
        trial.fail(f"a step changes frozen parameters: {some(moved)}")
    for name in _FROZEN_LATER:
        named[name].requires_grad_(False)  # noqa: FBT003 - torch takes no name
    before, kept = params_of(built), state_of(built)
    trial.step_given(model, built, 2)
    moved = [name for name in _FROZEN_LATER if not same_bits(before[name], named[name].detach())]
    if moved:
        trial.fail(
            f"a step changes parameters without a gradient: {some(moved)}. Skip a parameter whose `grad` is "
            "None first, before weight decay too"
        )
    if get_registry().optimizer(optimizer).granularity is not Granularity.GROUP:
        later = state_of(built)
        changed = [
            key for key in differences(kept, later) if any(f" of {name}" in key for name in _FROZEN_LATER)
        ]
        if changed:
            trial.fail(
                "a step of other parameters changes the state of parameters without a gradient: "
                f"{some(changed)}. Update averages and counts only where there is a gradient"
            )
