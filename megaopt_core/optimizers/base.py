"""The one step pipeline: every optimizer of megaopt steps through it, single or chained, sharded or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.optimizers.check import WatchedModel
from megaopt_core.optimizers.live_state import LiveState
from megaopt_core.optimizers.measure import GradStats, found_inf_in, measure, stats_device
from megaopt_core.optimizers.part import Counting, OptimizerPart
from megaopt_core.optimizers.precision import PrecisionPolicy
from megaopt_core.optimizers.report import OptimizerReport, build_report
from megaopt_core.optimizers.result import StepResult
from megaopt_core.optimizers.stages import stage
from megaopt_core.optimizers.state_dict import export_state_dict, import_state_dict
from megaopt_core.parallel.groups import ProcessGroupCollection
from megaopt_core.sharding.base import ShardedParams

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.optimizers.grad_scaler import MegatronGradScaler
    from megaopt_core.params.routing import Routing

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(torch.optim.Optimizer):
    """An inner optimizer, a precision policy and sharded parameters, stepped by one pipeline.

    It is a `torch.optim.Optimizer`: `param_groups` holds the model's parameters in dictionaries that are made once and
    never replaced, `state` is live, `state_dict` has torch's schema with `param_names`. A step goes: collect gradients,
    unscale and check them, norm, clip, count zeros, inner step, write back, synchronise parameters.

    Args:
        inner: the torch optimizer that steps the tensors of `precision`; its groups correspond to `param_groups`.
        precision: which tensors are stepped, and how they meet the model's.
        sharded_params: this rank's pieces.
        config: the run's configuration.
        param_groups: the public groups, holding the model's parameters.
        names: model parameter to canonical name.
        stepped: the tensors that `precision.attach` returned.
        process_groups: the process groups.
        grad_scaler: the loss scaler; None: gradients are not scaled.
        counting: parameter name to how it enters norms.
        routing: the routing that this was built for; None for an optimizer that was wrapped by hand.
    """

    parts: list[OptimizerPart]

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        precision: PrecisionPolicy,
        sharded_params: ShardedParams,
        *,
        config: OptimizerConfig,
        param_groups: Sequence[dict[str, Any]],
        names: Mapping[torch.nn.Parameter, str],
        stepped: Sequence[torch.Tensor],
        process_groups: ProcessGroupCollection | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        counting: Mapping[str, Counting] | None = None,
        routing: Routing | None = None,
    ) -> None:
        groups = list(param_groups)
        part = OptimizerPart(inner, precision, sharded_params, stepped, groups, config, counting or {})
        self._setup(
            [part],
            config=config,
            param_groups=groups,
            names=names,
            process_groups=process_groups,
            grad_scaler=grad_scaler,
            routing=routing,
        )

    def _setup(
        self,
        parts: list[OptimizerPart],
        *,
        config: OptimizerConfig,
        param_groups: list[dict[str, Any]],
        names: Mapping[torch.nn.Parameter, str],
        process_groups: ProcessGroupCollection | None,
        grad_scaler: MegatronGradScaler | None,
        routing: Routing | None,
    ) -> None:
        self._built = False
        super().__init__([{"params": []}], dict(parts[0].inner.defaults) if parts else {})
        self.parts = parts
        self.config = config
        self.routing = routing
        self.param_groups = param_groups
        self.names = names
        self.process_groups = process_groups or ProcessGroupCollection()
        self.grad_scaler = grad_scaler
        self.grad_norms: dict[str | None, float] = {}
        self.watched_model = WatchedModel()
        self._live_state = LiveState(parts, names)
        self._built = True

    # What torch's own base class would do with attributes that are ours.

    @property
    def state(self) -> Any:
        """Live state keyed by model parameter: what the inner optimizers hold, under the parameters that users know."""
        return self._live_state if self.__dict__.get("_built") else self.__dict__.setdefault("_torch_state", defaultdict(dict))

    @state.setter
    def state(self, value: Any) -> None:
        if self.__dict__.get("_built"):
            raise UnsupportedOperationError("optimizer.state cannot be replaced; change its entries, or load a state dict")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: groups, sharding and state are decided when the optimizer is built.

        Args:
            param_group: what would be added.

        Raises:
            UnsupportedOperationError: always, once the optimizer is built.
        """
        if self.__dict__.get("_built"):
            raise UnsupportedOperationError(
                "add_param_group is not possible after the optimizer is built: routing, sharding and state are fixed "
                "then. Build a new optimizer from the extended model and load the old one's state_dict with strict=False"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOperationError("an optimizer cannot be pickled or copied; save its state_dict() instead")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__getstate__()

    # The pipeline.

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The optimizers that this one consists of: itself, unless it is a chain."""
        return (self,)

    @property
    def is_mixed_precision(self) -> bool:
        """True when non-finite gradients skip the step."""
        return any(part.precision.is_mixed for part in self.parts)

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Step every parameter once.

        Args:
            closure: computes loss and gradients; called once, before gradients are collected.

        Returns:
            `(update_successful, grad_norm, num_zeros_in_grad)`. When gradients are not finite in mixed precision:
            `(False, None, None)`, and nothing has changed.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            mixed = self.is_mixed_precision
            found = self._collect_and_unscale()
            stats = self._measure_and_clip(found, check_finite=mixed and found is None)
            if mixed and self._skip(stats.found_inf):
                return StepResult(False, None, None)
            successful = self.step_with_ready_grads()
        nothing = 0.0 if mixed else None
        norm = stats.norms.get(None, nothing)
        return StepResult(successful, norm, stats.zeros if self.config.log_num_zeros_in_grad else (0 if mixed else None))

    def _collect_and_unscale(self) -> torch.Tensor | None:
        for part in self.parts:
            part.collect_grads()
        if self.grad_scaler is None:
            return None
        with stage(self.config, "optimizer-unscale-and-check-inf"):
            grads = [grad for part in self.parts for grad in part.all_grads()]
            return found_inf_in(grads, self.grad_scaler.inv_scale, stats_device(self.parts))

    def _measure_and_clip(self, found: torch.Tensor | None, *, check_finite: bool) -> GradStats:
        with stage(self.config, "optimizer-clip-main-grad"):
            stats = measure(
                self.parts,
                self.process_groups,
                self.norm_groups,
                norms=self.config.clip_grad > 0.0,
                zeros=self.config.log_num_zeros_in_grad,
                found_inf=found,
                check_finite=check_finite,
            )
            if not stats.found_inf:
                self._clip_with(stats.norms, self.config.clip_grad)
        return stats

    def _clip_with(self, norms: Mapping[str | None, float], clip_grad: float) -> None:
        self.grad_norms = dict(norms)
        coefficients = {}
        for group, norm in norms.items():
            coefficient = clip_grad / (norm + 1.0e-6)
            if coefficient < 1.0:
                coefficients[group] = coefficient
        for part in self.parts:
            part.scale_later(coefficients)

    def _skip(self, found_inf: bool) -> bool:
        if self.grad_scaler is not None:
            self.grad_scaler.update(found_inf)
        if found_inf:
            for part in self.parts:
                part.discard_grads()
        return found_inf

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Collect, unscale and check gradients: the first half of :meth:`step`.

        Returns:
            Whether a gradient is not finite on some rank (always False in fp32); then this step must be given up.
        """
        found = self._collect_and_unscale()
        if not self.is_mixed_precision:
            return False
        stats = measure(
            self.parts,
            self.process_groups,
            self.norm_groups,
            norms=False,
            zeros=False,
            found_inf=found,
            check_finite=found is None,
        )
        return self._skip(stats.found_inf)

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step with the gradients that :meth:`prepare_grads` collected, write back, synchronise parameters.

        Returns:
            True.
        """
        for part in self.parts:
            part.step()
        with stage(self.config, "params-all-gather"):
            for part in self.parts:
                part.sharded.start_param_sync()
            for part in self.parts:
                part.sharded.finish_param_sync()
        return True

    # Norms and counts, for trainers that drive the stages themselves.

    @property
    def norm_groups(self) -> tuple[str, ...]:
        """Names of the separate gradient norms, the same on every rank."""
        return () if self.routing is None else self.routing.grad_norm_groups

    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the L2 norm of the collected gradients over all ranks that hold a part of the model."""
        stats = measure(self.parts, self.process_groups, self.norm_groups, norms=True, zeros=False)
        self.grad_norms = dict(stats.norms)
        return stats.norms[None]

    @torch.no_grad()
    def clip_grad_norm(self, clip_grad: float) -> float:
        """Clip the collected gradients; the factor is applied by the next `step_with_ready_grads`.

        Args:
            clip_grad: the largest norm that is left as it is.

        Returns:
            The norm before clipping.
        """
        norm = self.get_grad_norm()
        self._clip_with(self.grad_norms, clip_grad)
        return norm

    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return how many elements of the collected gradients are zero, duplicates not counted."""
        stats = measure(self.parts, self.process_groups, self.norm_groups, norms=False, zeros=True)
        return stats.zeros or 0

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Return whether any rank has parameters of a separate norm.

        Args:
            grad_norm_group: the name that parameters carry as `grad_norm_group`.
        """
        return grad_norm_group in self.norm_groups

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Return every model parameter that this optimizer steps on this rank."""
        return [param for group in self.param_groups for param in group["params"]]

    def get_main_params(self) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizers step."""
        return [tensor for part in self.parts for tensor in part.stepped]

    def get_grads_for_grad_norm(self) -> list[torch.Tensor]:
        """Return the collected gradients that enter the main norm on this rank."""
        return [grad for part in self.parts for group, grad in part.counted_grads() if group is None]

    # Loss scale.

    def get_loss_scale(self) -> torch.Tensor:
        """Return the loss scale, an fp32 tensor of one element on the parameters' device; 1 where nothing scales."""
        scale = torch.ones(1) if self.grad_scaler is None else self.grad_scaler.scale
        return scale.to(stats_device(self.parts))

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; call `backward` on the result.

        Args:
            loss: the unscaled loss.
        """
        return loss if self.grad_scaler is None else loss * self.get_loss_scale().to(loss.device)[0]

    # Housekeeping.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `grad`, and `main_grad` where there is one.

        Args:
            set_to_none: drop `grad` instead of filling it with zeros; buffers (`main_grad`) are always filled.
        """
        buffers, grads = [], []
        for param in self.get_parameters():
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None:
                buffers.append(main_grad)
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad = param.grad.detach()
                    grads.append(param.grad)
        with torch.no_grad():
            if buffers or grads:
                torch._foreach_zero_([*buffers, *grads])

    def reload_model_params(self) -> None:
        """Take the model's present values over into main parameters, after weights were loaded into the model."""
        for part in self.parts:
            part.precision.reload_model_params()

    def train(self, mode: bool = True) -> None:
        """Tell inner optimizers that have modes (schedule-free ones) that training goes on.

        Args:
            mode: False means evaluation.
        """
        for part in self.parts:
            switch = getattr(part.inner, "train" if mode else "eval", None)
            if switch is not None:
                switch()
                part.precision.write_back()

    def eval(self) -> None:
        """Tell inner optimizers that have modes that evaluation begins."""
        self.train(False)

    def check(self, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None) -> tuple[str, ...]:
        """Return what no longer fits between this optimizer and its model, in words; empty when all is well.

        Found are parameters that were tied, replaced, added, frozen or unfrozen after the build. Reports list the same.

        Args:
            model: the model, or its chunks, as it is now; None: the one that the optimizer was built for.
        """
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        return self.watched_model.problems(self.names, chunks)

    def record_changes(self, *, exact: bool = True) -> None:
        """Choose how `report(after_step=True)` finds out what a step changed, from the next step on.

        Args:
            exact: compare every value before and after each step (two passes over the parameters). False: all values in
                the first step, a sample of each tensor in later ones.
        """
        for part in self.parts:
            part.changes.exact = exact

    def report(self, *, after_step: bool = False) -> OptimizerReport:
        """Return the proof of what this optimizer is: every parameter with its optimizer, plugin, group, lr, wd, reason.

        Args:
            after_step: add how many parameters each optimizer changed in the last step.

        Raises:
            UnsupportedOperationError: `after_step` is asked for and no step was made.
        """
        if after_step and not any(part.changes.has_step for part in self.parts):
            raise UnsupportedOperationError("report(after_step=True): no step has been made yet")
        return build_report(self, after_step=after_step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's schema, with `param_names` in every group."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = export_state_dict(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned: by name where both have names, else by position.

        Values are copied into the tensors that exist; a state dict that does not fit changes nothing.

        Args:
            state_dict: the state; it is not changed.
            strict: every parameter must be in the state dict and the other way round.

        Raises:
            StateDictError: names or shapes do not fit.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        import_state_dict(self, state_dict, strict=strict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
