"""The numbers and votes of one step: on the device until somebody asks for them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from attrs import define, field

from megaopt_core.optimizers._step.ballot import FOUND_INF, Heard

__all__ = ["StepStats", "ToHost"]


class ToHost:
    """Numbers that travel to the host while the device goes on; numbers of no CUDA device stay where they are.

    Args:
        values: the numbers, as one tensor.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values
        self._arrived: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(values.device))

    @cached_property
    def numbers(self) -> list[Any]:
        """The numbers; the host waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[Any] = self._host.tolist()
        return numbers


@define(eq=False)
class StepStats:
    """Norms, zeros and votes of one step over all ranks.

    Args:
        keys: norm group of each sum of squares, the main one first.
        has_norms: squares were summed.
        has_zeros: zeros were counted; their number follows the squares.
        heard: sums and votes.
        refusal: why this rank cannot step; None: it can.
        is_read: the host reads before the step.
        stops: the votes that stop a step.
        threshold: the largest norm of a step that is made; infinity: every one is.
    """

    keys: Sequence[str | None]
    has_norms: bool
    has_zeros: bool
    heard: Heard
    refusal: Exception | None
    is_read: bool
    stops: frozenset[str]
    threshold: float
    noop: torch.Tensor | None = field(default=None, init=False)
    """On the device, 1.0 where the step changes nothing, else 0.0; None: nothing on the device stops it."""
    clip_grad: float = field(default=0.0, init=False)
    """The largest norm that clipping left as it was; 0 where nothing was clipped."""
    settled: set[str] = field(factory=set, init=False)
    """Votes that stop steps, and of which observers said that this one goes on; the device knows of none."""
    _norms: Mapping[str | None, float] | None = field(default=None, init=False)
    _copied: ToHost | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self._copied = ToHost(self.heard.values) if len(self.heard.values) else None

    @property
    def _numbers(self) -> list[Any]:
        return [] if self._copied is None else self._copied.numbers

    @property
    def norms(self) -> Mapping[str | None, float]:
        """Norm group to L2 norm; the host waits until it is measured, not until the step is made."""
        if self._norms is None:
            squares = self._numbers if self.has_norms else []
            self._norms = {key: math.sqrt(value) for key, value in zip(self.keys, squares, strict=False)}
        return self._norms

    def take_norms(self, norms: Mapping[str | None, float]) -> None:
        """Know norms that were measured after ranks had met.

        Args:
            norms: norm group to L2 norm.
        """
        self._norms = norms

    def norm(self, otherwise: float | None) -> float | None:
        """Return the main norm.

        Args:
            otherwise: what is returned where norms were not asked for.
        """
        return self.norms[None] if self.has_norms else otherwise

    @property
    def is_above(self) -> bool:
        """Whether the main norm is above the threshold; NaN is above every finite one."""
        return self.has_norms and math.isfinite(self.threshold) and not self.norms[None] <= self.threshold

    @property
    def is_stopped(self) -> bool:
        """Whether the step changes nothing on this rank; the host waits for what only the device knows."""
        if not self.is_read and self.noop is None:
            return self.refusal is not None
        return self.is_above or any(self.fired(name) for name in self.stops - self.settled)

    def stop_on_device(self) -> torch.Tensor | None:
        """Return :attr:`noop`, and make it."""
        first = len(self.heard.values) - len(self.heard.flags)
        places = [at for at, name in enumerate(self.heard.flags, first) if name in self.stops]
        reasons = [self.heard.values[places[0] : places[-1] + 1].any()] if places else []
        if math.isfinite(self.threshold):
            reasons.append(~(self.heard.values[0].sqrt() <= self.threshold))
        if reasons:
            self.noop = (reasons[0] if len(reasons) == 1 else reasons[0] | reasons[1]).float()
        return self.noop

    def zeros(self, otherwise: int | None) -> int | None:
        """Return how many elements were zero.

        Args:
            otherwise: what is returned where they were not counted.
        """
        return int(self._numbers[len(self.keys)]) if self.has_zeros else otherwise

    def fired(self, name: str) -> bool:
        """Return whether a vote fired on any rank; the host waits for what only the device knows.

        Args:
            name: the vote.
        """
        if name in self.heard.flags:
            at = len(self.heard.values) - len(self.heard.flags) + self.heard.flags.index(name)
            return bool(self._numbers[at] > 0)
        return self.heard.known.get(name, False)

    @property
    def found_inf(self) -> bool:
        """Whether a gradient is not finite on some rank, and that is a reason to skip the step."""
        return self.fired(FOUND_INF)

    def clip_factors(self, clip_grad: float) -> dict[str | None, float | torch.Tensor]:
        """Return the factor that clips each norm group, as a number; where the host does not read, its inverse.

        The inverse is on the device, for fused steps divide by it.

        Args:
            clip_grad: the largest norm that is left as it is.
        """
        self.clip_grad = clip_grad
        if self.is_read or self._norms is not None:
            factors = {key: clip_grad / (norm + 1.0e-6) for key, norm in self.norms.items()}
            # As in torch, a norm that is NaN makes every gradient NaN: `not >=` where `<` would say no.
            return {key: factor for key, factor in factors.items() if not factor >= 1.0}
        divisors = (self.heard.values[: len(self.keys)].sqrt() + 1.0e-6) / clip_grad
        return dict(zip(self.keys, divisors.clamp(min=1.0).unbind(), strict=True))  # `clamp` keeps NaN
