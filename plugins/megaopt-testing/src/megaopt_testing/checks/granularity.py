"""Granularity: an optimizer that is declared to work element by element steps halves as it steps the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import torch

from megaopt_core.config import constructor_kwargs
from megaopt_core.errors import MegaoptError
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import Granularity
from megaopt_core.plugin_api import OptimizerEntry
from megaopt_core.registry import get_registry
from megaopt_testing.checks.settings import own_settings
from megaopt_testing.checks.settings_act import WAYS, switched
from megaopt_testing.snapshot import same_bits
from megaopt_testing.trial import Trial

__all__ = ["check_granularity", "requires_elements"]

_STEPS = 3
_BLOCKS = (3, 9, 1)
"""How many times the alignment each slice is long, the rest aside."""
_MANY = 20_000
"""Elements of a tensor that is large: some keep states of those in blocks."""


def requires_elements(entry: OptimizerEntry) -> str | None:
    """Return why the check cannot be made of an optimizer, None when it can.

    Args:
        entry: the optimizer's entry.
    """
    return (
        None if entry.granularity is Granularity.ELEMENT else f"its granularity is {entry.granularity.value}"
    )


def check_granularity(optimizer: str, **settings: Any) -> None:
    """Slices of a tensor at multiples of the entry's alignment step as the whole tensor does, bit for bit.

    The whole is a matrix, a small and a large one, and slices are ranges of its elements in one dimension, as
    strategies cut them. Gradients differ in size by a factor of a million from slice to slice, so that whatever looks
    at the whole tensor (a norm, a mean, a maximum) shows. So it is with each of its settings switched otherwise, where
    the entry still says that it works element by element.

    Args:
        optimizer: registered name.
        **settings: fields of the configuration.

    Raises:
        ConformanceError: a slice goes another way.
    """
    trial = Trial(optimizer, settings)
    for needed in ({}, *_switches(trial)):
        try:
            built = trial.build(trial.model(), **needed)
        except (MegaoptError, Warning):
            continue  # it cannot be, or not beside the other settings
        entry = get_registry().optimizer(optimizer)
        if entry.configured(built.config).granularity is Granularity.ELEMENT:
            _require_elements(trial, entry, built, needed, 1)
            if not needed:
                _require_elements(trial, entry, built, needed, 1 + _MANY // (13 * entry.alignment) // 5 * 5)


def _switches(trial: Trial) -> Iterator[dict[str, Any]]:
    """Yield every switch of the optimizer's own settings by itself."""
    for name, info in own_settings(trial.optimizer).items():
        if info.field.name not in WAYS:
            for value in switched(info, trial.settings.get(name, info.default)):
                yield {name: value}


def _require_elements(
    trial: Trial, entry: OptimizerEntry, built: MegatronOptimizer, needed: Mapping[str, Any], times: int
) -> None:
    name = trial.own_names(built)[0]
    tensor = next(t for part in built.parts for t in part.stepped if t.param_info.name == name)  # type: ignore[attr-defined] # build sets it
    kwargs = constructor_kwargs(entry, built.config, [trial.model()])
    ends = [0]
    for blocks in _BLOCKS:
        ends.append(ends[-1] + times * blocks * entry.alignment)
    ends.append(ends[-1] + 2 * entry.alignment + 5)
    start = torch.randn(ends[-1], generator=torch.Generator().manual_seed(0))
    whole, *slices = (
        torch.nn.Parameter(start[first:last].clone()) for first, last in ((0, ends[-1]), *pairwise(ends))
    )
    whole = torch.nn.Parameter(whole.detach().view(5, -1))  # the number of elements is a multiple of 5
    for piece in (whole, *slices):
        piece.param_info = tensor.param_info  # type: ignore[attr-defined] # as build does
    optimizers = [entry.load_class()([{"params": params}], **kwargs) for params in ([whole], slices)]
    for step in range(_STEPS):
        grad = torch.randn(ends[-1], generator=torch.Generator().manual_seed(1 + step))
        for index, (first, last) in enumerate(pairwise(ends)):
            grad[first:last] *= 1e-3 * 1e3 ** (index % 3)
            slices[index].grad = grad[first:last].clone()
        whole.grad = grad.view_as(whole)
        for inner in optimizers:
            if callable(train := getattr(inner, "train", None)):
                train()
            inner.step()
        if not same_bits(whole.detach().view(-1), torch.cat([piece.detach() for piece in slices])):
            told = "".join(f" with {key}={value!r}" for key, value in needed.items())
            trial.fail(
                f"it is declared to work element by element{told} at an alignment of {entry.alignment}, but "
                f"its step {step + 1} differs between slices of {ends[-1]} elements and whole tensors. If it "
                'reads whole tensors or their shape, declare granularity="tensor" (or `granularity_for`, if '
                "settings decide); if it reads blocks, declare their length as `alignment`"
            )
