"""Whether a class's step commutes with cutting: tensors apart, tensors in slices; bit for bit."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from megaopt_bridge.trials import Outcome, Trial, gradient, start
from megaopt_core.params import Granularity

__all__ = ["ALIGNMENTS", "STEPS", "alike", "granularity_of", "run_tensors", "same"]

STEPS = 30
"""Long enough for what happens only every few steps, and for warm-ups of a few."""

ALIGNMENTS = (8, 256)
"""Multiples at which slices are tried to begin; the second is the block of most quantized states."""

_PADDED_TO = 256
_SEQUENCES = (list, tuple, deque)

type Shape = tuple[int, ...]
type _Cut = Callable[[torch.Tensor], list[torch.Tensor]]


def granularity_of(
    trial: Trial, shapes: Sequence[Shape], scalars: Collection[str]
) -> tuple[Granularity, int]:
    """Return how finely a class's work may be cut, and at multiples of how many elements.

    Args:
        trial: the class.
        shapes: of tensors that it takes.
        scalars: state keys with one number for a parameter.
    """
    numbered = [(shape, seed) for seed, shape in enumerate(shapes)]
    together = run_tensors(trial, [numbered], STEPS)
    apart = run_tensors(trial, [[tensor] for tensor in numbered], STEPS)
    # With other luck, which tells also what is not twice the same: coins tossed in steps, or a memory of its own.
    alone = [run_tensors(trial, [[tensor]], STEPS, luck=1) for tensor in numbered]
    joined = Outcome([run.params[0] for run in alone], [run.states[0] for run in alone], {})
    if not (same(apart, together) and same(joined, together)):
        return Granularity.GROUP, ALIGNMENTS[0]
    for alignment in ALIGNMENTS:
        alike = (
            _slices_alike(trial, shape, seed, whole, alignment, scalars)
            for (shape, seed), whole in zip(numbered, alone, strict=True)
        )
        if all(alike) and _fused_alike(trial, numbered, alone):
            return Granularity.ELEMENT, alignment
    return Granularity.TENSOR, ALIGNMENTS[0]


def run_tensors(
    trial: Trial, groups: Sequence[Sequence[tuple[Shape, int]]], steps: int, *, luck: int = 0
) -> Outcome:
    """Step tensors of given shapes, whose values and gradients depend on a seed each.

    Args:
        trial: the class.
        groups: shape and seed of the tensors of each group.
        steps: how many.
        luck: seed of Python's and numpy's random numbers.
    """
    return trial.run(
        [[start(shape, seed) for shape, seed in group] for group in groups],
        lambda step: [[gradient(shape, seed, step) for shape, seed in group] for group in groups],
        steps,
        luck=luck,
    )


def _slices_alike(
    trial: Trial, shape: Shape, seed: int, whole: Outcome, alignment: int, scalars: Collection[str]
) -> bool:
    """Step a tensor in flat slices that begin at multiples of the alignment, and compare."""
    numel = math.prod(shape)
    inside = (alignment * (numel * part // (7 * alignment)) for part in (1, 2, 5))
    spans = [slice(*ends) for ends in itertools.pairwise(sorted({0, numel, *inside}))]

    def cut(value: torch.Tensor) -> list[torch.Tensor]:
        return [value.reshape(-1)[span] for span in spans]

    try:
        parts = trial.run([cut(start(shape, seed))], lambda step: [cut(gradient(shape, seed, step))], STEPS)
    except Exception:  # noqa: BLE001 - what steps a whole tensor may refuse a slice of it, in any way
        return False
    if not all(map(_bits, parts.params, cut(whole.params[0]))):
        return False
    return all(
        _state_alike(state, whole.states[0], shape, cut, index, scalars)
        for index, state in enumerate(parts.states)
    )


def _state_alike(
    part: Mapping[str, Any],
    whole: Mapping[str, Any],
    shape: Shape,
    cut: _Cut,
    index: int,
    scalars: Collection[str],
) -> bool:
    """Compare a slice's state with the slice of a state."""
    if part.keys() != whole.keys():
        return False
    for key, value in whole.items():
        elementwise = isinstance(value, torch.Tensor) and tuple(value.shape) == shape and key not in scalars
        expected = cut(value)[index] if elementwise else value
        if not alike(part[key], expected):
            return False
    return True


def _fused_alike(trial: Trial, numbered: Sequence[tuple[Shape, int]], alone: Sequence[Outcome]) -> bool:
    """Step all tensors as one flat one, padded between, and compare."""
    sizes = [math.prod(shape) for shape, _ in numbered]
    padded = [math.ceil(size / _PADDED_TO) * _PADDED_TO for size in sizes]
    offsets = list(itertools.accumulate(padded, initial=0))

    def flat(values: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        joined = torch.zeros(offsets[-1])
        for offset, value in zip(offsets, values, strict=False):
            joined[offset : offset + value.numel()] = value.reshape(-1)
        return [[joined]]

    try:
        fused = trial.run(
            flat([start(*tensor) for tensor in numbered]),
            lambda step: flat([gradient(*tensor, step) for tensor in numbered]),
            STEPS,
        )
    except Exception:  # noqa: BLE001 - as above
        return False
    return all(
        _bits(fused.params[0][offset : offset + size], run.params[0].reshape(-1))
        for offset, size, run in zip(offsets, sizes, alone, strict=False)
    )


def same(one: Outcome, other: Outcome) -> bool:
    """Return whether two runs left the same bits, in parameters and in states.

    Args:
        one: what one left.
        other: what the other left.
    """
    return all(map(_bits, one.params, other.params)) and all(map(alike, one.states, other.states))


def alike(one: Any, other: Any) -> bool:
    """Return whether two states, or values of one, are the same; containers of tensors too.

    Args:
        one: one value.
        other: the other.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _bits(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, _SEQUENCES) and isinstance(other, _SEQUENCES):
        return len(one) == len(other) and all(map(alike, one, other))
    if type(one) is not type(other):
        return False
    # An object that knows no equality but its own is compared by what it holds.
    kind: Any = type(one)
    if kind.__eq__ is object.__eq__ and hasattr(one, "__dict__"):
        return alike(vars(one), vars(other))
    return bool(one == other or (one != one and other != other))  # noqa: PLR0124 - NaN


def _bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values; NaN equals itself, a zero with a sign one without."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN
