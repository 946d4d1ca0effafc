"""The order of a step.

Late parameters join -> settings are checked -> observers look -> gradients are collected -> unscaled -> measured ->
*ranks meet* -> decide -> clip -> inner steps -> write back -> transforms -> parameters are synchronised ->
observers are told.
Nothing before ranks meet decides anything: a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import torch
from attrs import define, field

from megaopt_core.errors import ConfigurationError, UnsupportedOperationError, warn_user
from megaopt_core.execution._stages import stage
from megaopt_core.optimizers._gradients.statistics import is_read_freely
from megaopt_core.optimizers._result import StepResult, UnreadStepResult
from megaopt_core.optimizers._step.ballot import (
    BROUGHT,
    FOUND_INF,
    GRADIENT,
    REFUSED,
    Ballot,
    add_up,
    joins_unevenly,
)
from megaopt_core.optimizers._step.observers import Observers
from megaopt_core.optimizers._step.refusal import Refusal, collect, noting_who_stepped, raise_refusal
from megaopt_core.optimizers._step.stats import StepStats
from megaopt_core.optimizers._step.sums import GradSums, found_inf_in, stats_device
from megaopt_core.optimizers._step.transforms import Transforms
from megaopt_core.parallel._groups import size_of
from megaopt_core.plugin_api._observers import StepOutcome
from megaopt_core.sharding._live_model import has_gradient

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler

__all__ = ["StepPipeline"]

logger = logging.getLogger(__name__)

_NO_GRADIENT = (
    "no parameter has a gradient, and the step changes none. The usual causes: backward() was not called, or "
    "zero_grad() was called after it; or the loss was computed with another model than the one that the optimizer was "
    "built for: a copy (copy.deepcopy, a second instance, a wrapper that copies). Build the optimizer for the model "
    "that is trained"
)


@define(eq=False)
class StepPipeline:
    """Makes the steps of an optimizer.

    Args:
        optimizer: what is stepped.
        scaler: the loss scaler; None: gradients are not scaled.
    """

    optimizer: MegatronOptimizer
    scaler: MegatronGradScaler | None
    _observers: Observers | None = field(default=None, init=False)
    _transforms: Transforms | None = field(default=None, init=False)
    last: StepStats | None = field(default=None, init=False)
    """The statistics of the last step."""
    norms: Mapping[str | None, float] | None = field(default=None, init=False)
    """Norms that were measured after the last step had collected; None: those of the step."""
    _undecided: StepStats | None = field(default=None, init=False)
    """The last step's, whose votes nobody has read."""
    _ready: StepStats | None = field(default=None, init=False)
    """The statistics of a first half whose second half is yet to come."""
    _has_stepped: bool = field(default=False, init=False)
    _has_warned: bool = field(default=False, init=False)
    _ballots: dict[tuple[bool, bool], Ballot] = field(factory=dict, init=False)

    # A step.

    def step(self) -> StepResult:
        """Step every parameter once."""
        config = self.optimizer.config
        norms = config.clip_grad > 0.0 or math.isfinite(config.grad_norm_skip_threshold)
        stats = self._begin(norms=norms, zeros=config.log_num_zeros_in_grad, reads=False)
        norm, zeros = (0.0, 0) if self._is_mixed else (None, None)  # stand for what was not asked for
        is_taken = not (stats.is_read and self._gives_up(stats))
        if is_taken:
            if config.clip_grad > 0.0:
                self._scale_later(stats, config.clip_grad)
            self._take(stats)
            if not stats.is_read:
                return UnreadStepResult.of(stats, norm, zeros)
        else:
            self._end("skipped", stats)
            if stats.found_inf:
                return StepResult(update_successful=False, grad_norm=None, num_zeros_in_grad=None)
        return StepResult(is_taken, stats.norm(norm), stats.zeros(zeros))

    def _begin(self, *, norms: bool, zeros: bool, reads: bool) -> StepStats:
        """Collect, unscale, measure and vote; ranks meet; the host decides, unless it reads later.

        Args:
            norms: sum squares for norms.
            zeros: count zeros.
            reads: the host reads in any case.
        """
        self.decide_pending()
        if self._ready is not None:  # a first half whose second half never came
            self._end("skipped", self._ready)
        optimizer, refusal = self.optimizer, Refusal()
        refusal.of(optimizer.join_late_params)
        refusal.of(optimizer.check_settings)
        refusal.of(self.observers.before_step)
        if refusal.error is not None and self._is_alone:
            self.observers.after_step(StepOutcome("refused", None))
            raise refusal.error
        optimizer.twins.fold_grads()
        for part in optimizer.parts:
            refusal.of(collect, part)
        ballot, device = self.ballot, stats_device(optimizer.parts)
        sums = GradSums(optimizer.parts, [None, *optimizer.norm_groups], device)
        said = refusal.of(self._votes, ballot, sums)
        with stage(optimizer.config, "optimizer-count-zeros") if zeros else nullcontext():
            counts = refusal.of(sums.zeros) if zeros else None
        with stage(optimizer.config, "optimizer-clip-main-grad"):
            rows = refusal.of(sums.rows, norms, counts) if norms or zeros else {}
            if refusal.error is not None or said is None or rows is None:
                said, rows = {REFUSED: 1}, sums.neutral(zeros=zeros) if norms or zeros else {}
            heard = ballot.exchange(said, rows, device)
        optimizer.has_cleared = False
        is_known = any(heard.known.get(name) for name in ballot.stops)
        is_read = reads or is_known or self._reads_first(ballot, device)
        threshold = optimizer.config.grad_norm_skip_threshold
        stats = StepStats(sums.keys, norms, zeros, heard, refusal.error, is_read, ballot.stops, threshold)
        self.last, self.norms = stats, None
        if is_read:
            self._decide(stats)
        elif GRADIENT in heard.known:
            self._warn_if_empty(stats)
        return stats

    def _votes(self, ballot: Ballot, sums: GradSums) -> dict[str, int | torch.Tensor]:
        """Unscale gradients, and return this rank's votes."""
        optimizer = self.optimizer
        said: dict[str, int | torch.Tensor] = {GRADIENT: int(any(map(has_gradient, optimizer.names)))}
        found = None
        if self.scaler is not None:
            with stage(optimizer.config, "optimizer-unscale-and-check-inf"):
                grads = [grad for part in optimizer.parts for grad in part.all_grads()]
                found = found_inf_in(grads, float(self.scaler.inv_scale), sums.device) > 0
        if FOUND_INF in ballot.names:
            said[FOUND_INF] = sums.found_inf() if found is None else found
        if BROUGHT in ballot.names:
            together = [part.writes for part in optimizer.parts if part.writes.is_together]
            said[BROUGHT] = int(any(writes.wrote_together() for writes in together))
        return said | (self.observers.votes() if ballot.is_observed else {})

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank waits for this one in a step."""
        pgs = self.optimizer.process_groups
        groups = [pgs.dense_dp, pgs.mp, *(part.sharded.stats_group for part in self.optimizer.parts)]
        return all(size_of(group) == 1 for group in groups)

    def _reads_first(self, ballot: Ballot, device: torch.device) -> bool:
        """Whether the host reads before the step: it costs nothing, or the device alone cannot stop the step."""
        config, parts = self.optimizer.config, self.optimizer.parts
        if (
            is_read_freely(device)
            or config.read_before_step
            or not self._has_stepped
            or BROUGHT in ballot.names
        ):
            return True
        if self.scaler is not None and not self.scaler.is_constant:
            return True
        can_stop = FOUND_INF in ballot.names or math.isfinite(config.grad_norm_skip_threshold)
        shared = any(part.split is not None or size_of(part.sharded.stats_group) > 1 for part in parts)
        return (can_stop or shared) and not self._can_be_noop

    @property
    def _can_be_noop(self) -> bool:
        """Whether the device alone can stop a step: all parts of it, since a step is made as a whole."""
        return all(part.can_be_noop for part in self.optimizer.parts)

    def decide_pending(self) -> None:
        """Decide on the votes of the last step, where the host has not read them before it."""
        stats, self._undecided = self._undecided, None
        if stats is not None:
            self._decide(stats)
            if stats.noop is not None:
                self._gives_up(stats)

    def _decide(self, stats: StepStats) -> None:
        """Raise on all ranks together, or let observers act together; every rank has heard the same votes."""
        try:
            if stats.fired(REFUSED):
                raise_refusal(stats, self.ballot)
            observers = self.observers
            settled = observers.decide({spec.name: stats.fired(spec.name) for spec in observers.vote_specs})
            stats.settled |= settled if stats.is_read else set()
            self._warn_if_empty(stats)
            if stats.fired(BROUGHT):
                for part in self.optimizer.parts:
                    part.writes.take_over_together()
        except Exception:
            if stats.is_read:
                self._end("refused", stats)
            raise

    def _warn_if_empty(self, stats: StepStats) -> None:
        """Warn once of a step without any gradient, on the ranks that were heard."""
        unheard = GRADIENT in stats.heard.known and size_of(self.optimizer.process_groups.mp) > 1
        if not (self._has_warned or unheard or stats.fired(GRADIENT)):
            self._has_warned = True
            warn_user(_NO_GRADIENT, UserWarning)

    def _gives_up(self, stats: StepStats) -> bool:
        """Return whether the step is to change nothing, which the host knows; the loss scaler is told of found-inf."""
        names = [spec.name for spec in self.observers.vote_specs if spec.name in stats.stops - stats.settled]
        why = next((name for name in names if stats.fired(name)), None)
        if why is None and stats.is_above:
            norm, threshold = stats.norms[None], stats.threshold
            why = f"the gradients' norm {norm:g} is above grad_norm_skip_threshold={threshold:g}"
        scaler = self.scaler if self.skips_nonfinite and (stats.found_inf or why is None) else None
        if scaler is not None:
            scaler.update(stats.found_inf)
        if stats.found_inf:
            scale = "" if scaler is None else f"; the loss scale is {float(scaler.scale):g} now"
            why = f"a gradient is not finite on some rank{scale}"
        if why is not None:
            logger.info("step skipped: %s", why)
        return why is not None

    def _scale_later(self, stats: StepStats, clip_grad: float) -> None:
        """Let the inner steps apply the factors that clip gradients."""
        factors = stats.clip_factors(clip_grad)
        for part in self.optimizer.parts:
            part.scale_later(factors)

    def _take(self, stats: StepStats) -> None:
        """Step every part, write back, transform, synchronise parameters.

        A rank that refuses steps nothing, and takes part in what ranks exchange: all raise when they decide.
        """
        optimizer, transforms = self.optimizer, self.transforms
        self._undecided = None if stats.is_read else stats  # before anything can fail: ranks stay together
        noop = stats.stop_on_device() if not stats.is_read and self._can_be_noop else None
        in_units = not transforms.members
        try:
            for part in optimizer.parts:
                if stats.refusal is None:
                    with noting_who_stepped(optimizer.parts, part):
                        part.step(in_units=in_units, noop=noop)
                else:
                    part.stand_aside(in_units=in_units)
                if in_units and part.overlapped is None:
                    optimizer.start_param_sync(part)
            if not in_units:
                if stats.refusal is None:
                    transforms.apply(optimizer, noop)
                for part in optimizer.parts:
                    optimizer.start_param_sync(part)
            optimizer.finish_param_sync()
            for part in optimizer.parts:
                part.record_writes()
        except BaseException:
            self.observers.after_step(StepOutcome("failed", stats))
            raise
        self._has_stepped = True
        self.observers.after_step(StepOutcome("taken" if stats.is_read else None, stats))

    def _end(self, how: Literal["skipped", "refused"], stats: StepStats) -> None:
        """Give up the collected gradients of a step that is not made."""
        self._ready = None
        for part in self.optimizer.parts:
            part.discard_grads()
        self.observers.after_step(StepOutcome(how, stats))

    # The same step in two halves, for trainers that drive it themselves.

    def prepare(self) -> bool:
        """Make the first half of a step; return whether the step was given up."""
        stats = self._begin(norms=False, zeros=False, reads=True)
        if self._gives_up(stats):
            self._end("skipped", stats)
            return True
        self._ready = stats
        return False

    def step_with_ready(self) -> None:
        """Make the second half.

        Raises:
            UnsupportedOperationError: nobody has made the first half.
        """
        self.optimizer.check_settings()
        stats, self._ready = self._ready, None
        if stats is None:
            raise UnsupportedOperationError(
                "step_with_ready_grads() steps with the gradients that prepare_grads() has collected: call that first, "
                "and this where it returned False"
            )
        self._take(stats)

    def measure_norms(self) -> float:
        """Return the main norm of the collected gradients; a collective of the ranks that hold a part of the model."""
        keys = [None, *self.optimizer.norm_groups]
        sums = GradSums(self.optimizer.parts, keys, stats_device(self.optimizer.parts))
        squares = add_up(sums.rows(norms=True), sums.device).tolist()
        self.norms = {key: math.sqrt(square) for key, square in zip(keys, squares, strict=False)}
        return self.norms[None]

    def clip(self, clip_grad: float) -> float:
        """Clip the collected gradients, which the inner steps apply; return the norm before.

        Args:
            clip_grad: the largest norm that is left as it is; `inf` leaves all as they are.

        Raises:
            ConfigurationError: `clip_grad` is no number of at least 0.
        """
        if not (isinstance(clip_grad, (int, float)) and not isinstance(clip_grad, bool) and clip_grad >= 0):
            raise ConfigurationError.of("clip_grad", clip_grad, "must be a number of at least 0")
        norm = self.measure_norms()
        if self.last is not None and self.norms is not None:
            self.last.take_norms(self.norms)
            self._scale_later(self.last, clip_grad)
        return norm

    def count_zeros(self) -> int:
        """Return how many elements of the collected gradients are zero; a collective as :meth:`measure_norms` is."""
        sums = GradSums(self.optimizer.parts, [None], stats_device(self.optimizer.parts))
        return int(add_up(sums.rows(norms=False, counts=sums.zeros()), sums.device)[-1])

    # Observers and votes.

    @property
    def observers(self) -> Observers:
        """The observers of the steps; plugins are asked once, when the optimizer is built or first used."""
        if self._observers is None:
            self._observers = Observers.of(self.optimizer)
            self._observers.built()
        return self._observers

    @observers.setter
    def observers(self, observers: Observers) -> None:
        self._observers = observers
        self.parts_changed()

    @property
    def skips_nonfinite(self) -> bool:
        """True in mixed precision: a step with a gradient that is not finite is given up, unless that is not wanted."""
        return self._is_mixed and (self.optimizer.config.skip_nonfinite_steps or self.scaler is not None)

    @property
    def _is_mixed(self) -> bool:
        return True in {part.precision.is_mixed for part in self.optimizer.parts}

    @property
    def transforms(self) -> Transforms:
        """The transforms after each step; plugins are asked once."""
        if self._transforms is None:
            self._transforms = Transforms.of(self.optimizer)
        return self._transforms

    @property
    def ballot(self) -> Ballot:
        """The votes of a step; under torch's `Join`, where ranks step unequal numbers of times, without observers'."""
        pgs = self.optimizer.process_groups
        joins = size_of(pgs.dense_dp) > 1 and any(map(joins_unevenly, self.optimizer.watched_model.alive()))
        key = self.skips_nonfinite, joins
        if key not in self._ballots:
            observed = None if joins else self.observers.vote_specs
            self._ballots[key] = Ballot.of(self.optimizer.parts, pgs, self.skips_nonfinite, observed)
        return self._ballots[key]

    def parts_changed(self) -> None:
        """Know that parts or observers are others now: votes may be, too, and the host reads before the next step."""
        self._ballots.clear()
        self._has_stepped = False
