"""Finding out by trying what a class does: which tensors it takes, what it puts where, how it may be cut."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import Factory, frozen

from megaopt_bridge.attributes import resumes, unread
from megaopt_bridge.cutting import Shape, alike, granularity_of, run_tensors, same
from megaopt_bridge.trials import Trial, gradient, quiet, start
from megaopt_core.params import Granularity

__all__ = ["SHAPES", "Probe", "probe"]

SHAPES: tuple[Shape, ...] = ((), (7,), (200,), (37, 29), (128, 136), (2, 3, 5), (4, 3, 3, 3))
"""Shapes of every number of dimensions; the larger ones are where factored and blocked states begin."""

_FEW: tuple[Shape, ...] = ((7,), (37, 29))
"""Where one of a kind is enough."""

_FIRST_STEPS = 3


@frozen
class Probe:
    """What a class does, by trying.

    Args:
        granularity: `element` if the step of slices equals the slice of a step, `tensor` if a tensor's step by itself
            equals its step beside others, else `group`; bit for bit.
        alignment: where slices may begin, in elements.
        refused: number of dimensions to why the class does not take such tensors.
        presets: what a group is given before the first step, because the class puts it there in its first one.
        unready: keys that the first step adds to a group and that cannot be given beforehand.
        scalars: state keys with one number for a parameter.
        counts_empty: a step in which no parameter has a gradient changes the steps after it.
        trial: the class that was tried; None: it takes nothing.
    """

    granularity: Granularity
    alignment: int = 8
    refused: Mapping[int, str] = Factory(dict)
    presets: Mapping[str, Any] = Factory(dict)
    unready: frozenset[str] = frozenset()
    scalars: frozenset[str] = frozenset()
    counts_empty: bool = False
    trial: Trial | None = None

    @property
    def unread(self) -> frozenset[str]:
        """Which of `lr` and `weight_decay` change nothing where a group gives them; tried when it is asked for."""
        return frozenset() if self.trial is None else unread(self.trial, self._few())

    @property
    def resumes(self) -> bool:
        """With its state and groups alone a new object goes on bit for bit; tried when it is asked for."""
        return self.trial is None or resumes(self.trial, self._few())

    def _few(self) -> list[Shape]:
        shapes = [shape for shape in SHAPES if len(shape) not in self.refused]
        return [shape for shape in _FEW if shape in shapes] or shapes[-1:]

    @property
    def takes_nothing(self) -> bool:
        """True when the class steps no dense tensor at all."""
        return {len(shape) for shape in SHAPES} <= self.refused.keys()


def probe(cls: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> Probe:
    """Try a class out.

    The gradients are of very different sizes, with zeros; the learning rate changes from step to step.

    Args:
        cls: the class.
        kwargs: constructor arguments, without the parameters.

    Example:
        >>> probe(torch.optim.Adam, {"lr": 1e-3}).granularity.value
        'element'
        >>> probe(torch.optim.Adafactor, {"lr": 1e-3}).granularity.value
        'tensor'
    """
    bare = Trial(cls, kwargs, {})
    refused = _refused(bare)
    shapes = [shape for shape in SHAPES if len(shape) not in refused]
    if not shapes:
        return Probe(Granularity.GROUP, refused=refused)
    presets, unready = _presets(bare, shapes)
    trial = Trial(cls, kwargs, presets)
    scalars = _scalars(trial, shapes)
    counts = _counts_empty(trial, shapes[-1])
    granularity, alignment = granularity_of(trial, shapes, scalars)
    return Probe(granularity, alignment, refused, presets, unready, scalars, counts, trial)


def _counts_empty(trial: Trial, shape: Shape) -> bool:
    """Return whether a step without gradients leaves anything behind, at first or later, or raises."""
    values = [[start(shape, 0)]]
    given = [gradient(shape, 0, step) for step in range(_FIRST_STEPS)]
    beside = [None, given[0], None, *given[1:]]
    plain = trial.run(values, lambda step: [[given[step]]], len(given), rates=(1.0,))
    try:
        found = trial.run(values, lambda step: [[beside[step]]], len(beside), rates=(1.0,))
    except Exception:  # noqa: BLE001 - a class may need a gradient in any way
        return True
    return not (same(found, plain) and alike(found.group_keys, plain.group_keys))


def _refused(trial: Trial) -> dict[int, str]:
    """Return the numbers of dimensions whose tensors a class cannot step."""
    refused: dict[int, str] = {}
    for seed, shape in enumerate(SHAPES):
        try:
            run_tensors(trial, [[(shape, seed)]], _FIRST_STEPS)
        except Exception as error:  # noqa: BLE001 - a class may refuse in any way
            refused[len(shape)] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return refused


def _presets(trial: Trial, shapes: Sequence[Shape]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return what a first step adds to its group, if giving it beforehand changes nothing, and else its keys."""
    tensors = [[(shape, seed) for seed, shape in enumerate(shapes)]]
    with quiet():
        before = trial.make([{"params": [torch.nn.Parameter(start(shapes[-1], 0))]}]).param_groups[0].keys()
    lazy = run_tensors(trial, tensors, _FIRST_STEPS)
    added = {key: value for key, value in lazy.group_keys.items() if key not in before}
    if not all(type(value) in {int, float} or isinstance(value, torch.Tensor) for value in added.values()):
        return {}, frozenset(added)
    presets = {key: _zero(value) for key, value in added.items()}
    try:
        ready = run_tensors(Trial(trial.cls, trial.kwargs, presets), tensors, _FIRST_STEPS)
    except Exception:  # noqa: BLE001 - the class looks whether the key is there, and may fail in any way
        return {}, frozenset(added)
    if same(ready, lazy) and alike(ready.group_keys, lazy.group_keys):
        return presets, frozenset()
    return {}, frozenset(added)


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def _scalars(trial: Trial, shapes: Sequence[Shape]) -> frozenset[str]:
    """Return the state keys that hold one number for a parameter of many elements."""
    many = [shape for shape in shapes if math.prod(shape) > 1]
    states = [run_tensors(trial, [[(shape, 0)]], _FIRST_STEPS).states[0] for shape in many]
    keys = {key for state in states for key in state}
    return frozenset(key for key in keys if all(_is_number(state[key]) for state in states if key in state))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)
