"""The gradients of one step: collected, unscaled, checked, measured, clipped, or given up."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import (
    ConfigurationError,
    GradientError,
    MegaoptError,
    OwnershipError,
    UnsupportedOperationError,
    warn_user,
)
from megaopt_core.execution._stages import stage
from megaopt_core.optimizers._grad_norm import (
    Asked,
    GradStats,
    found_inf_in,
    measure,
    measure_unread,
    stats_device,
    zeros_of,
)
from megaopt_core.optimizers._gradients.double_clipping import DoubleClippingWatch
from megaopt_core.optimizers._gradients.statistics import is_read_freely
from megaopt_core.optimizers._gradients.unread import UnreadStats
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.sharding._live_model import gradient_misfit

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler

__all__ = ["StepGradients"]

logger = logging.getLogger(__name__)

_NO_GRADIENT = (
    "no parameter has a gradient, and the step changes none. The usual causes: backward() was not called, or "
    "zero_grad() was called after it; or the loss was computed with another model than the one that the optimizer was "
    "built for: a copy (copy.deepcopy, a second instance, a wrapper that copies). Build the optimizer for the model "
    "that is trained"
)


@define(eq=False)
class StepGradients:
    """What a step does to gradients over all parts and ranks, before anything is stepped.

    Args:
        parts: what is stepped; the optimizer's own list.
        config: the run's configuration.
        process_groups: the process groups.
        norm_groups: names of the separate gradient norms, the same on every rank.
        scaler: the loss scaler; None: gradients are not scaled.
    """

    parts: list[OptimizerPart]
    config: OptimizerConfig
    process_groups: ProcessGroupCollection
    norm_groups: tuple[str, ...]
    scaler: MegatronGradScaler | None
    unread: UnreadStats | None = field(default=None, init=False)
    """What the last step measured without reading it; None: it read what it measured."""
    _norms: Mapping[str | None, float] = field(factory=dict, init=False)
    when_written: Callable[[], None] | None = field(default=None, init=False)
    """Called on all ranks before a step where somebody wrote to the model on one of them; None: nobody asks."""
    is_empty: bool = field(default=False, init=False)
    """No parameter has a gradient in this step: on no rank that was heard of."""
    _warned: bool = field(default=False, init=False)
    _refused: MegaoptError | None = field(default=None, init=False)
    _clipped_before: DoubleClippingWatch = field(factory=DoubleClippingWatch, init=False)

    @property
    def skips_what_is_not_finite(self) -> bool:
        """True in mixed precision: a step with a gradient that is not finite is given up, unless that is not wanted."""
        skips = self.config.skip_nonfinite_steps or self.scaler is not None
        return skips and any(part.precision.is_mixed for part in self.parts)

    @property
    def norms(self) -> Mapping[str | None, float]:
        """The norms that were measured last, the main one under None."""
        return self._norms if self.unread is None else self.unread.norms

    @norms.setter
    def norms(self, norms: Mapping[str | None, float]) -> None:
        self._norms, self.unread = norms, None

    def collect(self, refused: MegaoptError | None) -> torch.Tensor | None:
        """Bring this step's gradients to what is stepped, and unscale them.

        Args:
            refused: why this rank cannot step; it is raised when the other ranks have heard of it.

        Returns:
            A flag that is above 0 where a gradient is not finite on this rank; None where nothing scales.
        """
        self._refused = refused
        for part in self.parts:
            try:
                part.collect_grads()
            except UnsupportedOperationError as error:  # kept until the other ranks have heard of it
                self._refused = self._refused or error
            except RuntimeError as error:
                # It may follow from what is refused, as gradients of other shapes do.
                self._refused = self._refused or _misfit(part, error)
        if self.scaler is None:
            return None
        with stage(self.config, "optimizer-unscale-and-check-inf"):
            grads = [grad for part in self.parts for grad in part.all_grads()]
            return found_inf_in(grads, float(self.scaler.inv_scale), stats_device(self.parts))

    def refuse(self, asked: Callable[[MegaoptError | None], MegaoptError | None]) -> None:
        """Let other ranks say whether this one may step, and tell them whether it can.

        Args:
            asked: called with why this rank cannot step; returns why it must not.

        Raises:
            MegaoptError: what `asked` raises; the gradients are given up then.
        """
        with self._discarded_on_error():
            self._refused = asked(self._refused)

    def measure_and_clip(self, found: torch.Tensor | None) -> GradStats:
        """Return what the step is to know of its gradients, and clip them.

        Args:
            found: what :meth:`collect` returned.
        """
        clip_grad, zeros = self.config.clip_grad, None
        if self.config.log_num_zeros_in_grad:
            with stage(self.config, "optimizer-count-zeros"):
                zeros = zeros_of(self.parts)
        if self.unread is not None:
            self.unread.settle()
            self.unread = None
        with stage(self.config, "optimizer-clip-main-grad"):
            norms = clip_grad > 0.0 or math.isfinite(self.config.grad_norm_skip_threshold)
            finite = found is None and self.skips_what_is_not_finite
            asked = self._asked(norms=norms, zeros=zeros, finite=finite, found_inf=found)
            if not self._waits(found):
                self._raise_if_refused(on_some_rank=asked.refused)
                return self._measure_unread(asked, clip_grad)
            stats = self._measure(asked)
            self.norms = stats.norms
            if not stats.found_inf and clip_grad > 0.0:
                self._clip(stats.norms, clip_grad)
        return stats

    def _waits(self, found: torch.Tensor | None) -> bool:
        """Whether the host has to read what is measured before the step: a rule may skip it, or a rank refuse it."""
        return (
            found is not None
            or self.skips_what_is_not_finite
            or math.isfinite(self.config.grad_norm_skip_threshold)
            or any(size_of(part.sharded.stats_group) > 1 for part in self.parts)
            or is_read_freely(stats_device(self.parts))
        )

    def _measure(self, asked: Asked) -> GradStats:
        """Measure; raise on every rank where one cannot step, and take over what somebody wrote to the model on one."""
        stats = measure(self.parts, self.process_groups, asked)
        self._raise_if_refused(on_some_rank=stats.refused)
        self._warn_if_empty(stats.norms)
        if stats.written and self.when_written is not None:
            with self._discarded_on_error():
                self.when_written()
        for part in self.parts:
            part.writes.take_over_together()
        return stats

    def _measure_unread(self, asked: Asked, clip_grad: float) -> GradStats:
        """Measure and clip on the device; nothing is read until somebody asks."""
        self._warn_if_empty({})
        self.unread, factors = measure_unread(self.parts, asked, self._clipped_before, clip_grad)
        for part in self.parts:
            part.scale_later(factors)
        return GradStats(found_inf=False, norms={}, zeros=None)

    def _warn_if_empty(self, norms: Mapping[str | None, float]) -> None:
        """Warn once of a step without any gradient; of ranks that hold other parts of the model the norm tells."""
        if (
            self._warned
            or not self.is_empty
            or (size_of(self.process_groups.mp) > 1 and norms.get(None) != 0.0)
        ):
            return
        self._warned = True
        warn_user(_NO_GRADIENT, UserWarning)

    def are_accepted(self, stats: GradStats) -> bool:
        """Return whether to step; gradients that are not to be stepped are given up, and the loss scale is updated.

        Args:
            stats: what :meth:`measure_and_clip` returned.
        """
        if self.unread is not None:
            return True
        if not stats.found_inf and self._is_too_large(stats.norms):
            self._discard()
            logger.info(
                "step skipped: the gradients' norm %g is above grad_norm_skip_threshold=%g",
                stats.norms[None],
                self.config.grad_norm_skip_threshold,
            )
            return False
        return not self._is_skipped(stats.found_inf)

    def are_finite(self, found: torch.Tensor | None) -> bool:
        """Return whether to step, without measuring norms; as :meth:`are_accepted` otherwise.

        Args:
            found: what :meth:`collect` returned.
        """
        mixed = self.skips_what_is_not_finite
        asked = self._asked(finite=mixed and found is None, found_inf=found if mixed else None)
        return not self._is_skipped(self._measure(asked).found_inf)

    def norm(self) -> float:
        """Return the main norm of the collected gradients over all ranks that hold a part of the model."""
        asked = self._asked(norms=True, finite=self.skips_what_is_not_finite)
        self.norms = measure(self.parts, self.process_groups, asked).norms
        return self.norms[None]

    def clip(self, clip_grad: float) -> float:
        """Clip the collected gradients; the inner step applies the factor.

        Args:
            clip_grad: the largest norm that is left as it is; `inf` leaves all as they are.

        Returns:
            The norm before clipping.

        Raises:
            ConfigurationError: `clip_grad` is no number of at least 0.
        """
        if not (isinstance(clip_grad, (int, float)) and not isinstance(clip_grad, bool) and clip_grad >= 0):
            raise ConfigurationError.of("clip_grad", clip_grad, "must be a number of at least 0")
        norm = self.norm()
        self._clip(self.norms, clip_grad)
        return norm

    def zeros(self) -> int:
        """Return how many elements of the collected gradients are zero, duplicates not counted."""
        return measure(self.parts, self.process_groups, self._asked(zeros=zeros_of(self.parts))).zeros or 0

    def _asked(self, **asked: Any) -> Asked:
        return Asked(
            norm_groups=self.norm_groups,
            refused=self._refused is not None,
            refusals=self._shares_out,
            writes=self.when_written is not None,
            brought=any(part.writes.is_together for part in self.parts),
            **asked,
        )

    @property
    def _shares_out(self) -> bool:
        """Whether a step ends by bringing parameters to other ranks, which would wait for one that has raised."""
        alone = size_of(self.process_groups.mp)
        return any(size_of(part.sharded.stats_group) > alone for part in self.parts)

    def _raise_if_refused(self, *, on_some_rank: bool) -> None:
        if not on_some_rank:
            return
        self._discard()
        raise self._refused or OwnershipError(
            "another rank cannot step what trains now, or was converted, since the optimizer was built; its error says "
            "which parameters. No rank has stepped"
        )

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except MegaoptError:
            self._discard()
            raise

    def _discard(self) -> None:
        for part in self.parts:
            part.discard_grads()

    def _is_too_large(self, norms: Mapping[str | None, float]) -> bool:
        """Whether the main norm is above the threshold; NaN is above every one."""
        threshold = self.config.grad_norm_skip_threshold
        return math.isfinite(threshold) and not norms[None] <= threshold

    def _clip(self, norms: Mapping[str | None, float], clip_grad: float) -> None:
        coefficients = {group: clip_grad / (norm + 1.0e-6) for group, norm in norms.items()}
        # As in torch, a norm that is NaN makes every gradient NaN: `not >=` where `<` would say no.
        active = {group: value for group, value in coefficients.items() if not value >= 1.0}
        for part in self.parts:
            part.scale_later(active)
        if None in norms:
            self._clipped_before.observe(norms[None], clip_grad)

    def _is_skipped(self, found_inf: bool) -> bool:
        """Tell the loss scaler, and give the step up where a gradient is not finite and that is a reason."""
        if not self.skips_what_is_not_finite:
            return False
        scaler = self.scaler
        if scaler is not None:
            scaler.update(found_inf)
        if found_inf:
            self._discard()
            scale = "" if scaler is None else f"; the loss scale is {float(scaler.scale):g} now"
            logger.info("step skipped: a gradient is not finite on some rank%s", scale)
        return found_inf


def _misfit(part: OptimizerPart, error: RuntimeError) -> GradientError:
    """Return the error about gradients of other shapes than their parameters, with names; raise any other."""
    found = {
        shard.name: misfit
        for piece in part.pieces
        for param, (_, shard) in zip(piece.model_params, piece.spec.members, strict=True)
        if (misfit := gradient_misfit(param)) is not None
    }
    if not found:
        raise error
    name, misfit = next(iter(found.items()))
    others = f" (and {len(found) - 1} more do not fit)" if len(found) > 1 else ""
    return GradientError(
        f"{name!r} has a {misfit}{others}: it must have one element for each of the parameter's", names=found
    )
