"""`MegatronOptimizer`: parts that are stepped as one, and what a `torch.optim.Optimizer` is to the outside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._compile import _disable_dynamo

from megaopt_core.config._group_values import GroupChecks
from megaopt_core.errors import UnsupportedOperationError
from megaopt_core.execution._stages import stage
from megaopt_core.optimizers._between_steps.added_groups import add_group, assign_groups, follow_last
from megaopt_core.optimizers._between_steps.group_settings import common_defaults
from megaopt_core.optimizers._between_steps.step_lock import StepLock
from megaopt_core.optimizers._gradients.closures import require_closure
from megaopt_core.optimizers._live_state import LiveState
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._result import StepResult
from megaopt_core.optimizers._state_dict import (
    export_state_dict,
    import_state_dict,
    model_values,
    start_main_value,
)
from megaopt_core.optimizers._step.observers import Observers
from megaopt_core.optimizers._step.pipeline import StepPipeline
from megaopt_core.optimizers._step.sums import stats_device
from megaopt_core.optimizers._tied_params import Twins
from megaopt_core.parallel._groups import ProcessGroupCollection
from megaopt_core.parallel._meeting import takes_part
from megaopt_core.params._parts import local_tensor
from megaopt_core.plugin_api._observers import Change, ReportLine
from megaopt_core.registry._catalogue import CHECKPOINT_READER, GUARDS
from megaopt_core.registry._missing import import_distribution
from megaopt_core.reporting._build_report import build_report
from megaopt_core.reporting._report import OptimizerReport
from megaopt_core.reporting._watched_model import WatchedModel
from megaopt_core.sharding._wrapped import reducer_of
from megaopt_core.state._named import NamedState

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # noqa: TID251 - only the annotation

    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.optimizers._building.late_params import LateParams
    from megaopt_core.optimizers._gradients.grad_scaler import MegatronGradScaler
    from megaopt_core.routing._routing import Routing
    from megaopt_core.schedules._scheduler import OptimizerParamScheduler

__all__ = ["MegatronOptimizer"]


class MegatronOptimizer(torch.optim.Optimizer):
    """Inner optimizers, each with a precision policy and sharded parameters, stepped in one way.

    It is a `torch.optim.Optimizer`: `param_groups` holds the model's parameters in dictionaries that are made once and
    never replaced, `state` is live, `state_dict` has torch's schema with `param_names`. A step goes: collect gradients,
    unscale and check them, norm, clip, count zeros, inner step, write back, synchronise parameters.

    Args:
        parts: what is stepped; one for each inner optimizer.
        config: the run's configuration.
        names: model parameter to canonical name.
        process_groups: the process groups.
        grad_scaler: the loss scaler; None: gradients are not scaled.
        norm_groups: names of the separate gradient norms, the same on every rank.
        twins: parameter to the other parameter objects that share its memory.
        routing: the routing that this was built for; None for an optimizer that was wrapped by hand.
    """

    _live_state: LiveState | None = None

    # `torch.compile` takes none of the methods that a training step may call apart (`_disable_dynamo`): their kernels
    # are compiled already, and what they keep between steps is no graph.

    def __init__(
        self,
        parts: Sequence[OptimizerPart],
        *,
        config: OptimizerConfig,
        names: Mapping[torch.nn.Parameter, str],
        process_groups: ProcessGroupCollection | None = None,
        grad_scaler: MegatronGradScaler | None = None,
        norm_groups: Sequence[str] = (),
        twins: Mapping[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] | None = None,
        routing: Routing | None = None,
    ) -> None:
        super().__init__([{"params": []}], common_defaults([part.inner for part in parts]))
        self.parts = list(parts)
        self.param_groups = [group for part in parts for group in part.groups]
        self.names = names
        self.config = config
        self.process_groups = process_groups or ProcessGroupCollection()
        self.norm_groups = tuple(norm_groups)
        self.twins = Twins(twins or {})
        self.routing = routing
        self.pipeline = StepPipeline(self, grad_scaler)
        self.watched_model = WatchedModel()
        self.unused_settings: tuple[str, ...] = ()
        self.late: LateParams | None = None
        self.step_lock = StepLock()
        self.has_cleared = True
        """Gradients were cleared since the last step, or there was none."""
        self.bounds_before_load: list[dict[str, Any]] | None = None
        self.schedules: list[weakref.ref[OptimizerParamScheduler]] = []
        self.refresh_state()

    # What torch's own class has, where ours differs.

    @property
    def state(self) -> Any:
        """Live state keyed by model parameter: what the inner optimizers hold, under the parameters that users know."""
        return self._live_state

    @state.setter
    def state(self, value: Any) -> None:
        if self._live_state is not None:  # torch's class sets its own, which nothing reads
            raise UnsupportedOperationError(
                "optimizer.state cannot be replaced; change its entries, or load a state dict"
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, made once. Assigned, as Lightning does at a resume, they are given settings and added to."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._live_state is None:
            self._groups = groups
        else:
            assign_groups(self, groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step more parameters of the model, in groups of their own: as many as the optimizers and settings they get.

        Each gets the optimizer and settings that the build would have given it, but for those that the group has.

        Args:
            param_group: `params` of the model, frozen or not, and settings such as `lr`.

        Raises:
            UnsupportedOperationError: the optimizer was wrapped by hand.
            ConfigurationError: it is no group, or a setting cannot be.
            OwnershipError: a parameter is stepped already, is not in the model, or cannot be stepped by this strategy.
        """
        if self._live_state is None:
            super().add_param_group(param_group)
        else:
            add_group(self, param_group)

    def __getstate__(self) -> NoReturn:
        raise UnsupportedOperationError(
            "an optimizer cannot be pickled or copied; save its state_dict() instead"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self.__getstate__()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `grad`, and `main_grad` where there is one.

        Args:
            set_to_none: drop `grad` instead of filling it with zeros; buffers (`main_grad`) are always filled.
        """
        self.has_cleared = True
        filled = []
        are_zero, zeroed = self.watched_model.zero_grad_buffers()
        for param in (*self.get_parameters(), *self.twins):
            main_grad = getattr(param, "main_grad", None)
            if main_grad is not None and not are_zero and reducer_of(param) not in zeroed:
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

    # A step, and its stages for trainers that drive them themselves.

    @_disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """Step every parameter once.

        Args:
            closure: computes loss and gradients; called once, before gradients are collected.

        Returns:
            `(update_successful, grad_norm, num_zeros_in_grad)`. When gradients are not finite in mixed precision:
            `(False, None, None)`; when the norm is above `grad_norm_skip_threshold`: `(False, grad_norm,
            num_zeros_in_grad)`. Nothing has changed then but, for the former, the loss scale; gradients may be
            unscaled, and are to be cleared. Where the host need not decide before a step on an accelerator, it reads
            the result when you do.
        """
        if closure is not None:
            require_closure(closure)
            with torch.enable_grad():
                closure()
        with torch.no_grad(), self.step_lock:
            return self.pipeline.step()

    def join_late_params(self) -> None:
        """Look at the model, and step parameters that have begun to train.

        Raises:
            MegaoptError: some of it cannot be stepped.
        """
        if self.late is not None:
            self.late.settle()

    def check_settings(self) -> None:
        """Look at the settings of all groups before the first of them is stepped.

        Raises:
            ConfigurationError: a group holds a value that no setting could have.
            UnsupportedOperationError: groups or their parameters were exchanged by hand.
        """
        groups = [group for part in self.parts for group in part.groups]
        follow_last(groups)
        if list(map(id, groups)) != list(map(id, self.param_groups)):
            raise UnsupportedOperationError(
                f"param_groups has {len(self.param_groups)} groups; the optimizer was built with "
                f"{len(groups)} other ones. Groups cannot be added, removed or replaced: write into the "
                "groups that are there, and freeze parameters that must not be stepped"
            )
        for part in self.parts:
            part.check_settings()

    @_disable_dynamo
    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Collect, unscale and check gradients: the first half of :meth:`step`.

        Returns:
            Whether the step was given up: a gradient is not finite on some rank (in mixed precision), or an observer's
            vote has stopped it.
        """
        with self.step_lock:
            return self.pipeline.prepare()

    @_disable_dynamo
    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Step with the gradients that :meth:`prepare_grads` collected, write back, synchronise parameters.

        Returns:
            True.

        Raises:
            ConfigurationError: a group holds a value that no setting could have; nothing has changed.
            UnsupportedOperationError: :meth:`prepare_grads` was not called before.
        """
        with self.step_lock:
            self.pipeline.step_with_ready()
        return True

    def start_param_sync(self, part: OptimizerPart) -> None:
        """Begin to bring parameters to the ranks that need them; those of one part travel while the next steps."""
        with stage(self.config, "params-all-gather"):
            part.sharded.start_param_sync()

    @_disable_dynamo
    def finish_param_sync(self) -> None:
        """Return when parameters are up to date, or when the forward pass will wait for them."""
        with stage(self.config, "params-all-gather"):
            for part in self.parts:
                part.sharded.finish_param_sync()

    @_disable_dynamo
    @torch.no_grad()
    def get_grad_norm(self) -> float:
        """Return the L2 norm of the collected gradients over all ranks that hold a part of the model."""
        return self.pipeline.measure_norms()

    @property
    def grad_norms(self) -> Mapping[str | None, float]:
        """The norms that were measured last, the main one under None."""
        pipeline = self.pipeline
        if pipeline.norms is not None:
            return pipeline.norms
        return {} if pipeline.last is None else pipeline.last.norms

    @_disable_dynamo
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
        return self.pipeline.clip(clip_grad)

    @_disable_dynamo
    @torch.no_grad()
    def count_zeros(self) -> int:
        """Return how many elements of the collected gradients are zero, duplicates not counted."""
        return self.pipeline.count_zeros()

    def has_grad_norm_group(self, grad_norm_group: str) -> bool:
        """Return whether any rank has parameters of a separate norm.

        Args:
            grad_norm_group: the name that parameters carry as `grad_norm_group`.
        """
        return grad_norm_group in self.norm_groups

    # Precision and the loss scale.

    @property
    def grad_scaler(self) -> MegatronGradScaler | None:
        """The loss scaler; None: gradients are not scaled."""
        return self.pipeline.scaler

    @grad_scaler.setter
    def grad_scaler(self, scaler: MegatronGradScaler | None) -> None:
        self.pipeline.scaler = scaler

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

    # What is stepped, and its values.

    @property
    def children(self) -> tuple[MegatronOptimizer, ...]:
        """The optimizers that this one consists of: itself, unless it is a chain."""
        return (self,)

    @property
    def group_checks(self) -> list[GroupChecks]:
        """For every public group, what its values may be."""
        return [part.checks for part in self.parts for _ in part.groups]

    @property
    def observers(self) -> Observers:
        """The observers of its steps; none where it is stepped as a part of another."""
        return self.pipeline.observers

    def get_parameters(self) -> list[torch.nn.Parameter]:
        """Return every model parameter that this optimizer steps on this rank."""
        return [param for group in self.param_groups for param in group["params"]]

    def get_main_params(self) -> list[torch.Tensor]:
        """Return the tensors that the inner optimizers step."""
        return [tensor for part in self.parts for tensor in part.stepped]

    def join(self, other: MegatronOptimizer) -> None:
        """Step the parameters of another optimizer too, from now on.

        Args:
            other: built like this one, of other parameters of the same model.
        """
        self.parts += other.parts
        self.param_groups.extend(other.param_groups)
        self.names = {**self.names, **other.names}
        self.refresh_state()

    def know(
        self,
        names: Mapping[torch.nn.Parameter, str],
        twins: Mapping[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]],
        routing: Routing | None,
    ) -> None:
        """Take other parameters for those that are stepped: parts were changed.

        Args:
            names: model parameter to canonical name.
            twins: parameter to the other parameter objects that share its memory.
            routing: where all of them are routed.
        """
        self.names, self.twins, self.routing = names, Twins(twins), routing
        self.refresh_state()
        self.pipeline.parts_changed()

    def refresh_state(self) -> None:
        """Show the state of parameters that were added or replaced."""
        self._live_state = LiveState(self.parts, self.names)

    @_disable_dynamo
    def reload_model_params(self, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Take the model's present values over into main parameters, after weights were loaded into the model.

        A step does so by itself where somebody has written to the model. A main value that rounds to the model's stays.

        Args:
            state_dict: what was loaded, by parameter name, where it has more precision than the model: main parameters
                start from it instead of from the model's rounded values.

        Raises:
            StateDictError: `state_dict` lacks a parameter, or has another shape of one; nothing has been changed.
        """
        values = {} if state_dict is None else model_values(self, state_dict)
        for part in self.parts:
            part.sharded.take_model_values()
            part.precision.reload_model_params()
        for param, value in values.items():
            start_main_value(self, param, value)
        for part in self.parts:
            part.writes.record()
        self.observers.changed(Change.RELOADED)

    @torch.no_grad()
    def take_over(self, names: Collection[str] = (), *, together: bool = False) -> None:
        """Bring values that somebody wrote to the model into what is kept of them elsewhere; a step does so by itself.

        Step observers call it where they have found a write that no version counter tells of.

        Args:
            names: of the parameters to which somebody wrote.
            together: bring values to pieces that need all ranks for it, too: all ranks call it then.
        """
        for part in self.parts:
            part.writes.take_over(names)
            if together:
                part.writes.take_over_together()

    @contextmanager
    def changing(self, what: Change) -> Iterator[None]:
        """Take over what somebody wrote to the model before the block; take its values for ours after it.

        Args:
            what: what the block does, for observers.
        """
        self.observers.changing(what)
        self.take_over()
        yield
        for part in self.parts:
            part.writes.record_own()
        self.observers.changed(what)

    def before_save(self) -> None:
        """Let observers look at the state that is about to be saved; all ranks call it.

        Raises:
            MegaoptError: an observer refuses the save, or the last step, whose votes nobody had read.
        """
        self.pipeline.decide_pending()
        self.observers.before_save()

    @_disable_dynamo
    def train(self, mode: bool = True) -> None:
        """Tell inner optimizers that have modes (schedule-free ones) that training goes on.

        Args:
            mode: False means evaluation.
        """
        self._switch_mode("train" if mode else "eval")

    @_disable_dynamo
    def eval(self) -> None:
        """Tell inner optimizers that have modes that evaluation begins."""
        self._switch_mode("eval")

    @torch.no_grad()
    def _switch_mode(self, name: str) -> None:
        """Call `train` or `eval` on the inner optimizers that have it, and bring what it changes to every rank."""
        for part in self.parts:
            if hasattr(part.inner, name):
                part.runner.require_restored(f"{name}()")
        with self.changing(Change.MODE):
            switched = [part.switch_mode(name) for part in self.parts]
            if any(switched):
                for part in self.parts:
                    self.start_param_sync(part)
                self.finish_param_sync()
                for part in self.parts:
                    part.record_writes()

    @_disable_dynamo
    @torch.no_grad()
    def offload_to_cpu(self) -> None:
        """Move states and main parameters to CPU memory until :meth:`restore_from_cpu`, as between phases of a run.

        Reinforcement learning does so while it samples. Checkpoints can be saved meanwhile; a step raises. The model
        stays where it is; so does what an optimizer keeps outside of its `state`.

        Raises:
            PluginNotInstalledError: megaopt-device, which does this, is not installed.
        """
        for part in self.parts:
            part.runner.offload(part)
            part.changes.forget()
        self.observers.changed(Change.MOVED)

    @_disable_dynamo
    @torch.no_grad()
    def restore_from_cpu(self) -> None:
        """Move back what :meth:`offload_to_cpu` moved, to where it was; nothing to do where nothing was moved."""
        for part in self.parts:
            part.runner.restore(part)
            part.changes.forget()
        self.observers.changed(Change.MOVED)

    @_disable_dynamo
    def check(self, model: torch.nn.Module | Sequence[torch.nn.Module] | None = None) -> tuple[str, ...]:
        """Return what no longer fits between this optimizer, its model and other ranks; empty when all is well.

        Found are parameters that were tied, replaced, added, frozen or unfrozen after the build; reports list the same.
        Then what is not the same on all ranks that hold replicas: which parameters are stepped, and which train; their
        values and those of frozen ones, names, shapes and values of buffers, optimizer state, the settings of parameter
        groups and of schedulers. Where the optimizer was built with process groups of several ranks, this
        is a collective that all of them call.

        Args:
            model: the model, or its chunks, as it is now; None: the one that the optimizer was built for.

        Raises:
            MissingRanksError: a rank has not called it before the process group's timeout was over.
        """
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        found = self._problems(chunks)
        return (*found, *self.observers.check())

    def _problems(self, chunks: Sequence[torch.nn.Module] | None) -> tuple[str, ...]:
        """Return what no longer fits between this optimizer and its model."""
        names = {p: name for p, name in self.names.items() if self.late is None or p not in self.late.aside}
        return self.watched_model.problems(names, chunks)

    def record_changes(self, *, exact: bool = True) -> None:
        """Choose how `report(after_step=True)` finds out what a step changed, from the next step on.

        Args:
            exact: compare every value before and after each step (two passes over the parameters). False: all values in
                the first step, a sample of each tensor in later ones; on an accelerator in the steps 2, 4, 8, ...
        """
        for part in self.parts:
            part.changes.exact = exact

    @_disable_dynamo
    def report(self, *, after_step: bool = False, full: bool = False) -> OptimizerReport:
        """Return every parameter with its optimizer, plugin, lr, weight decay and reason: the proof of what this is.

        Printed, it is one screen, where repeated layers share a row; its `params` have a row for each parameter.

        Args:
            after_step: add how many parameters each optimizer changed in the last step.
            full: printed, it has a row for every parameter, with role, group and how the step is shared over ranks.

        Raises:
            UnsupportedOperationError: `after_step` is asked for and no step was made.
        """
        if after_step and not any(part.changes.has_step for part in self.parts):
            raise UnsupportedOperationError("report(after_step=True): no step has been made yet")
        return build_report(self, after_step=after_step, full=full)

    def step_notes(self) -> list[ReportLine]:
        """Return the lines of step observers for a report, and one where several ranks step that nobody compares."""
        lines = self.observers.report_lines()
        are_compared = any(spec.rule == "equal" for spec in self.observers.vote_specs)
        if takes_part(self.process_groups) and not are_compared:
            text = (
                "values of ranks are not compared, and one rank's refusal may not reach the others: pip "
                f"install {GUARDS}"
            )
            lines.append(ReportLine("ranks", text))
        overlaps = self.config.overlap_param_gather_with_optimizer_step
        return lines + self.pipeline.transforms.report_lines(overlaps=overlaps)

    def named_state(self) -> NamedState:
        """Return the state by the names of parameters: what a library of checkpoints lists, reads and writes."""
        return NamedState(self)

    def checkpoint_state(self) -> Stateful:
        """Return the optimizer as torch.distributed.checkpoint knows it, for loops that call `dcp.save` themselves.

        Raises:
            PluginNotInstalledError: megaopt-checkpoint, which does this, is not installed.
        """
        made = import_distribution(CHECKPOINT_READER, "optimizer.checkpoint_state()")
        stateful: Stateful = made.OptimizerCheckpointState(self)
        return stateful

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's schema, with `param_names` in every group.

        State of a parameter that a strategy cuts over ranks tells which part of the whole it is:
        `torch.distributed.checkpoint` saves and loads it, also by way of torch's `get_optimizer_state_dict`; it cannot
        be pickled, since one rank's part would be taken for the whole. Where owners keep states of whole tensors of a
        model that is cut (`sharding="fsdp"`), this and :meth:`load_state_dict` are collectives that all ranks call.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        with self.step_lock.saving():
            state_dict = export_state_dict(self)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load what :meth:`state_dict` returned: by name where both have names, else by position.

        Values are copied into the tensors that exist; a state dict that does not fit changes nothing. How torch
        computes (`fused`, `foreach`, `capturable`) stays as this optimizer was built.

        Args:
            state_dict: the state; it is not changed.
            strict: every parameter must be in the state dict and the other way round.

        Raises:
            OwnershipError: a parameter of the model has another shape, dtype or device than at the build.
            StateDictError: names or shapes do not fit.
        """
        if self.late is not None:
            self.late.look.require_unchanged()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        import_state_dict(self, state_dict, strict=strict)
        for part in self.parts:
            part.writes.record_own()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
