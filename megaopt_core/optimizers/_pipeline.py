"""The one step pipeline: every optimizer of megaopt steps through it, single or chained, sharded or not."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._compile import _disable_dynamo

from megaopt_core.config._group_values import GroupChecks
from megaopt_core.errors import ConfigurationError, MegaoptError, OwnershipError, UnsupportedOperationError
from megaopt_core.execution._stages import stage
from megaopt_core.optimizers._grad_norm import Asked, GradStats, found_inf_in, measure, stats_device, zeros_of
from megaopt_core.optimizers._gradients.double_clipping import DoubleClippingWatch
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._result import StepResult
from megaopt_core.optimizers._tied_params import Twins
from megaopt_core.optimizers._torch_surface import TorchSurface
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
    from megaopt_core.optimizers._loading.late_params import LateParams

__all__ = ["StepPipeline"]

logger = logging.getLogger(__name__)


class StepPipeline(TorchSurface):
    """Collect gradients, unscale and check them, norm, clip, count zeros, inner step, write back, synchronise.

    Args:
        parts: what is stepped; one for each inner optimizer.
        config: the run's configuration.
        param_groups: the public groups, holding the model's parameters.
        names: model parameter to canonical name.
        process_groups: the process groups.
        grad_scaler: the loss scaler; None: gradients are not scaled.
        norm_groups: names of the separate gradient norms, the same on every rank.
        twins: other parameter objects that share a parameter's memory.
    """

    def __init__(
        self,
        parts: Sequence[OptimizerPart],
        *,
        config: OptimizerConfig,
        param_groups: Sequence[dict[str, Any]],
        names: Mapping[torch.nn.Parameter, str],
        process_groups: ProcessGroupCollection | None,
        grad_scaler: MegatronGradScaler | None,
        norm_groups: Sequence[str],
        twins: Twins,
    ) -> None:
        super().__init__(parts, param_groups, names)
        self.config = config
        self.process_groups = process_groups or ProcessGroupCollection()
        self.grad_scaler = grad_scaler
        self.norm_groups = tuple(norm_groups)
        self.twins = twins
        self.grad_norms: dict[str | None, float] = {}
        self.late: LateParams | None = None
        self._refused: MegaoptError | None = None
        self.before_first_step: Callable[[], None] | None = None
        self._clipped_before = DoubleClippingWatch()

    @property
    def is_mixed_precision(self) -> bool:
        """True when non-finite gradients skip the step."""
        return any(part.precision.is_mixed for part in self.parts)

    @_disable_dynamo  # compiled, a step falls back to what it is: its kernels are compiled already
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Step every parameter once.

        Args:
            closure: computes loss and gradients; called once, before gradients are collected.

        Returns:
            `(update_successful, grad_norm, num_zeros_in_grad)`. When gradients are not finite in mixed precision:
            `(False, None, None)`; when the norm is above `grad_norm_skip_threshold`: `(False, grad_norm,
            num_zeros_in_grad)`. Nothing has changed then but, for the former, the loss scale.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            mixed = self.is_mixed_precision
            found = self._collect_and_unscale()
            stats = self._measure_and_clip(found)
            too_large = not stats.found_inf and self._is_too_large(stats.norms)
            if mixed and not too_large and self._skip(stats.found_inf):
                return StepResult(update_successful=False, grad_norm=None, num_zeros_in_grad=None)
            if too_large:
                self._give_up_step(stats.norms[None])
            successful = not too_large and self.step_with_ready_grads()
        norm = stats.norms.get(None, 0.0 if mixed else None)
        zeros = stats.zeros if self.config.log_num_zeros_in_grad else (0 if mixed else None)
        return StepResult(successful, norm, zeros)

    def _collect_and_unscale(self) -> torch.Tensor | None:
        self._check_settings()
        if self.before_first_step is not None:
            self.before_first_step()
            self.before_first_step = None
        self._refused = self._look()
        self.twins.fold_grads()
        for part in self.parts:
            try:
                part.collect_grads()
            except UnsupportedOperationError as error:  # kept until the other ranks have heard of it
                self._refused = self._refused or error
        if self.grad_scaler is None:
            return None
        with stage(self.config, "optimizer-unscale-and-check-inf"):
            grads = [grad for part in self.parts for grad in part.all_grads()]
            return found_inf_in(grads, float(self.grad_scaler.inv_scale), stats_device(self.parts))

    def _look(self) -> MegaoptError | None:
        """Look at what trains now, and return why some of it cannot be stepped."""
        if self.late is None:
            return None
        try:
            return self.late.settle()
        except MegaoptError as error:
            return error

    def _raise_if_refused(self, *, on_some_rank: bool) -> None:
        if not on_some_rank:
            return
        for part in self.parts:
            part.discard_grads()
        raise self._refused or OwnershipError(
            "another rank cannot step what trains now, or was converted, since the optimizer was built; its error says "
            "which parameters. No rank has stepped"
        )

    def _check_settings(self) -> None:
        """Look at what was written into any group before the first is stepped."""
        for part in self.parts:
            part.check_settings()

    @property
    def group_checks(self) -> list[GroupChecks]:
        """For every public group, what its values may be."""
        return [part.checks for part in self.parts for _ in part.groups]

    def _asked(self, *, norms: bool = False, zeros: bool = False, finite: bool = False) -> Asked:
        return Asked(norms, zeros, finite, self.norm_groups, refusals=self._shares_out)

    @property
    def _shares_out(self) -> bool:
        """Whether a step ends by bringing parameters to other ranks, which would wait for one that has raised."""
        alone = size_of(self.process_groups.mp)
        return any(size_of(part.sharded.stats_group) > alone for part in self.parts)

    def _measure_and_clip(self, found: torch.Tensor | None) -> GradStats:
        clip_grad, zeros = self.config.clip_grad, None
        if self.config.log_num_zeros_in_grad:
            with stage(self.config, "optimizer-count-zeros"):
                zeros = zeros_of(self.parts)
        finite = self.is_mixed_precision and found is None
        with stage(self.config, "optimizer-clip-main-grad"):
            norms = clip_grad > 0.0 or math.isfinite(self.config.grad_norm_skip_threshold)
            asked = self._asked(norms=norms, zeros=zeros is not None, finite=finite)
            stats = measure(
                self.parts,
                self.process_groups,
                asked,
                found_inf=found,
                zeros=zeros,
                refused=self._refused is not None,
            )
            self._raise_if_refused(on_some_rank=stats.refused)
            self.grad_norms = dict(stats.norms)
            if not stats.found_inf and clip_grad > 0.0:
                self._clip_with(stats.norms, clip_grad)
        return stats

    def _is_too_large(self, norms: Mapping[str | None, float]) -> bool:
        """Whether the main norm is above the threshold; NaN is above every one."""
        threshold = self.config.grad_norm_skip_threshold
        return math.isfinite(threshold) and not norms[None] <= threshold

    def _give_up_step(self, norm: float) -> None:
        for part in self.parts:
            part.discard_grads()
        threshold = self.config.grad_norm_skip_threshold
        logger.info(
            "step skipped: the gradients' norm %g is above grad_norm_skip_threshold=%g", norm, threshold
        )

    def _clip_with(self, norms: Mapping[str | None, float], clip_grad: float) -> None:
        coefficients = {group: clip_grad / (norm + 1.0e-6) for group, norm in norms.items()}
        # As in torch, a norm that is NaN makes every gradient NaN: `not >=` where `<` would say no.
        active = {group: value for group, value in coefficients.items() if not value >= 1.0}
        for part in self.parts:
            part.scale_later(active)
        if None in norms:
            self._clipped_before.observe(norms[None], clip_grad)

    def _skip(self, found_inf: bool) -> bool:
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
        if found_inf:
            for part in self.parts:
                part.discard_grads()
            scale = (
                ""
                if self.grad_scaler is None
                else f"; the loss scale is {float(self.grad_scaler.scale):g} now"
            )
            logger.info("step skipped: a gradient is not finite on some rank%s", scale)
        return found_inf

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Collect, unscale and check gradients: the first half of :meth:`step`.

        Returns:
            Whether a gradient is not finite on some rank (always False in fp32); then this step must be given up.
        """
        found = self._collect_and_unscale()
        mixed = self.is_mixed_precision
        asked, refused = self._asked(finite=mixed and found is None), self._refused is not None
        stats = measure(
            self.parts, self.process_groups, asked, found_inf=found if mixed else None, refused=refused
        )
        self._raise_if_refused(on_some_rank=stats.refused)
        return mixed and self._skip(stats.found_inf)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step with the gradients that :meth:`prepare_grads` collected, write back, synchronise parameters.

        Returns:
            True.

        Raises:
            ConfigurationError: a group holds a value that no setting could have; nothing has changed.
        """
        self._check_settings()
        self.step_and_start_sync()
        self.finish_param_sync()
        for part in self.parts:
            part.writes.record()
        return True

    @torch.no_grad()
    def step_and_start_sync(self) -> None:
        """Step with the collected gradients, and begin to bring parameters to the ranks that need them."""
        for part in self.parts:
            part.step()
            if part.overlapped is None:
                self._start_sync(part)

    def _start_sync(self, part: OptimizerPart) -> None:
        with stage(self.config, "params-all-gather"):
            part.sharded.start_param_sync()

    def finish_param_sync(self) -> None:
        """Return when parameters are up to date, or when the forward pass will wait for them."""
        with stage(self.config, "params-all-gather"):
            for part in self.parts:
                part.sharded.finish_param_sync()

    # Norms and counts, for trainers that drive the stages themselves.

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the L2 norm of the collected gradients over all ranks that hold a part of the model."""
        asked = self._asked(norms=True, finite=self.is_mixed_precision)
        stats = measure(self.parts, self.process_groups, asked)
        self.grad_norms = dict(stats.norms)
        return stats.norms[None]

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip the collected gradients; the factor is applied by the next `step_with_ready_grads`.

        Args:
            clip_grad: the largest norm that is left as it is; `inf` leaves all as they are.

        Returns:
            The norm before clipping.

        Raises:
            ConfigurationError: `clip_grad` is no number of at least 0.
        """
        if not (isinstance(clip_grad, (int, float)) and not isinstance(clip_grad, bool) and clip_grad >= 0):
            raise ConfigurationError(
                f"clip_grad={clip_grad!r}: must be a number of at least 0",
                setting="clip_grad",
                value=clip_grad,
            )
        norm = self.get_grad_norm()
        self._clip_with(self.grad_norms, clip_grad)
        return norm

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return how many elements of the collected gradients are zero, duplicates not counted."""
        return measure(self.parts, self.process_groups, self._asked(zeros=True)).zeros or 0

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Return whether any rank has parameters of a separate norm.

        Args:
            grad_norm_group: the name that parameters carry as `grad_norm_group`.
        """
        return grad_norm_group in self.norm_groups

    def get_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the collected gradients that enter the main norm on this rank."""
        return [grad for part in self.parts for group, grad in part.counted_grads() if group is None]

    # Loss scale.

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale, an fp32 tensor of one element on the parameters' device; 1 where nothing scales."""
        scale = 1.0 if self.grad_scaler is None else float(self.grad_scaler.scale)
        return torch.full((1,), scale, dtype=torch.float32, device=stats_device(self.parts))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; call `backward` on the result.

        Args:
            loss: the unscaled loss.
        """
        return loss if self.grad_scaler is None else loss * float(self.grad_scaler.scale)

    def switch_mode(self, name: str) -> None:
        """Call `train` or `eval` on the inner optimizers that have it, and bring what it changes to every rank.

        Args:
            name: `"train"` or `"eval"`.

        Raises:
            UnsupportedOperationError: `name` is another.
        """
        if name not in ("train", "eval"):
            raise UnsupportedOperationError(
                f"switch_mode({name!r}): optimizers have the modes 'train' and 'eval'"
            )
        with torch.no_grad():
            for part in self.parts:
                part.writes.settle()
            switched = [part.switch_mode(name) for part in self.parts]
            if any(switched):
                for part in self.parts:
                    self._start_sync(part)
                self.finish_param_sync()
                for part in self.parts:
                    part.writes.record()
