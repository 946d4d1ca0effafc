"""`MegatronOptimizer`: an inner optimizer, a precision policy and sharded parameters, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.config._group_values import GroupChecks, group_checks
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.optimizers._gradients.norm_deduplication import Counting
from megaopt_core.optimizers._loading.main_values import require_model_values, start_main_values
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._pipeline import StepPipeline
from megaopt_core.optimizers._state_dict import export_state_dict, import_state_dict
from megaopt_core.optimizers._tied_params import Twins
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.params._parts import local_tensor
from megaopt_core.plugin_api._entries import SCALAR_STATES
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.reporting._optimizer_report import OptimizerReport, build_report
from megaopt_core.reporting._replicas import Replicas
from megaopt_core.reporting._watched_model import WatchedModel
from megaopt_core.sharding._protocol import ShardedParams
from megaopt_core.state._stateful import OptimizerCheckpointState
from megaopt_core.state._torch_schema import with_slices

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # noqa: TID251 - only the annotation

    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.execution._exchanged_step import ExchangedStep
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
    from megaopt_core.routing._routing import Routing

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(StepPipeline):
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
        scalar_states: state keys with one number for a parameter, as the optimizer's entry names them.
        norm_groups: names of the separate gradient norms, the same on every rank.
        twins: other parameter objects that share a parameter's memory.
        routing: the routing that this was built for; None for an optimizer that was wrapped by hand.
        split: drives the step in three parts of pieces that have an exchange; None: the inner optimizer steps them.
        checks: key of a group to what may stand there; None: what the inner optimizer's defaults say.
    """

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
        scalar_states: frozenset[str] = SCALAR_STATES,
        norm_groups: Sequence[str] = (),
        twins: Twins | None = None,
        routing: Routing | None = None,
        split: ExchangedStep | None = None,
        checks: GroupChecks | None = None,
    ) -> None:
        groups = list(param_groups)
        part = OptimizerPart(
            inner,
            precision,
            sharded_params,
            stepped,
            groups,
            config,
            counting or {},
            scalar_states,
            split,
            group_checks(None, inner.defaults) if checks is None else checks,
        )
        super().__init__(
            [part],
            config=config,
            param_groups=groups,
            names=names,
            process_groups=process_groups,
            grad_scaler=grad_scaler,
            norm_groups=norm_groups,
            twins=twins or Twins(),
        )
        self.routing = routing
        self.watched_model = WatchedModel()
        self.unused_settings: tuple[str, ...] = ()
        self.replicas: Replicas | None = None

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The optimizers that this one consists of: itself, unless it is a chain."""
        return (self,)

    def join(self, other: MegatronOptimizer) -> None:
        """Step the parameters of another optimizer too, from now on.

        Args:
            other: built like this one, of other parameters of the same model.
        """
        self.parts += other.parts
        self.param_groups.extend(other.param_groups)
        self.names = {**self.names, **other.names}
        self.refresh_state()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `grad`, and `main_grad` where there is one.

        Args:
            set_to_none: drop `grad` instead of filling it with zeros; buffers (`main_grad`) are always filled.
        """
        filled = []
        are_zero = self.watched_model.zero_grad_buffers()
        for param in (*self.get_parameters(), *self.twins):
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None and not are_zero:
                filled.append(main_grad)
            if param.grad is not None:
                if set_to_none:
                    param.grad = None
                else:
                    param.grad = param.grad.detach()
                    filled.append(local_tensor(param.grad))
        with torch.no_grad():
            if filled:
                torch._foreach_zero_(filled)

    def reload_model_params(self, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take the model's present values over into main parameters, after weights were loaded into the model.

        A step does so by itself where somebody has written to the model. A main value that rounds to the model's stays.

        Args:
            state_dict: what was loaded, by parameter name, where it has more precision than the model: main parameters
                start from it instead of from the model's rounded values.

        Raises:
            StateDictError: `state_dict` lacks a parameter, or has another shape of one; nothing has been changed.
        """
        if state_dict is not None:
            require_model_values(self, state_dict)
        for part in self.parts:
            part.sharded.take_model_values()
            part.precision.reload_model_params()
        if state_dict is not None:
            start_main_values(self, state_dict)
        for part in self.parts:
            part.writes.record()

    def train(self, mode: bool = True) -> None:
        """Tell inner optimizers that have modes (schedule-free ones) that training goes on.

        Args:
            mode: False means evaluation.
        """
        self.switch_mode("train" if mode else "eval")

    def eval(self) -> None:
        """Tell inner optimizers that have modes that evaluation begins."""
        self.switch_mode("eval")

    def check(self, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None) -> tuple[str, ...]:
        """Return what no longer fits between this optimizer, its model and other ranks; empty when all is well.

        Found are parameters that were tied, replaced, added, frozen or unfrozen after the build; reports list the same.
        Then parameters whose values are not the same on all ranks that hold replicas of them: where the optimizer was
        built with process groups of several ranks, this is a collective that all of them call.

        Args:
            model: the model, or its chunks, as it is now; None: the one that the optimizer was built for.

        Raises:
            MissingRanksError: a rank has not called it before the process group's timeout was over.
        """
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        found = self.watched_model.problems(self.names, chunks)
        if self.replicas is None:
            return found
        self.watched_model.finish_param_sync()
        return (*found, *self.replicas.differences(self.names, self.routing))

    def require_equal_replicas(self) -> None:
        """Raise on all ranks unless replicas have the same values; the first step does it, a collective.

        Raises:
            RankMismatchError: it names parameters and ranks.
        """
        if self.replicas is not None:
            self.replicas.require_equal(self.names, self.routing)

    def record_changes(self, *, exact: bool = True) -> None:
        """Choose how `report(after_step=True)` finds out what a step changed, from the next step on.

        Args:
            exact: compare every value before and after each step (two passes over the parameters). False: all values in
                the first step, a sample of each tensor in later ones.
        """
        for part in self.parts:
            part.changes.exact = exact

    def report(self, *, after_step: bool = False) -> OptimizerReport:
        """Return every parameter with its optimizer, plugin, group, lr, wd and reason: the proof of what this is.

        Args:
            after_step: add how many parameters each optimizer changed in the last step.

        Raises:
            UnsupportedOperationError: `after_step` is asked for and no step was made.
        """
        if after_step and not any(part.changes.has_step for part in self.parts):
            raise UnsupportedOperationError("report(after_step=True): no step has been made yet")
        return build_report(self, after_step=after_step)

    def checkpoint_state(self) -> Stateful:
        """Return the optimizer as torch.distributed.checkpoint knows it, for loops that call `dcp.save` themselves."""
        return OptimizerCheckpointState(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's schema, with `param_names` in every group.

        State of a parameter that a strategy cuts over ranks tells which part of the whole it is:
        `torch.distributed.checkpoint` saves and loads it, also by way of torch's `get_optimizer_state_dict`; it cannot
        be pickled, since one rank's part would be taken for the whole.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = export_state_dict(self)
        cut = self.state.cut_names()
        if cut:
            state_dict = with_slices(self, state_dict, cut)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned: by name where both have names, else by position.

        Values are copied into the tensors that exist; a state dict that does not fit changes nothing. How torch
        computes (`fused`, `foreach`, `capturable`) stays as this optimizer was built.

        Args:
            state_dict: the state; it is not changed.
            strict: every parameter must be in the state dict and the other way round.

        Raises:
            StateDictError: names or shapes do not fit.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        for part in self.parts:
            part.writes.settle()
        import_state_dict(self, state_dict, strict=strict)
        for part in self.parts:
            part.writes.record()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
