"""How the step of one inner optimizer is run: in place and at once, or as the runner of a plugin does it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from megaopt_core.errors import PluginError, UnsupportedOperationError
from megaopt_core.execution._inner import run_inner
from megaopt_core.execution._inner_part import InnerPart
from megaopt_core.execution._learned_state import learned_state
from megaopt_core.execution._memory_order import MemoryOrder
from megaopt_core.execution._placeholders import StatePlaceholder, put_placeholders
from megaopt_core.execution._stages import stage
from megaopt_core.plugin_api._declared_state import DeclaredState
from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.registry._catalogue import STEP_RUNNER
from megaopt_core.registry._missing import import_distribution
from megaopt_core.registry._registry import get_registry
from megaopt_core.sharding._protocol import ShardedParams

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.plugin_api._entries import InitState, OptimizerEntry

__all__ = ["StepRunner", "step_runner", "unused_by_runners"]

_ASKED_BY = ("optimizer_cpu_offload", "optimizer_cuda_graph")
"""Settings that no inner optimizer acts on by itself."""


class StepRunner:
    """Steps an inner optimizer where its tensors are, all of them at once.

    A plugin that runs steps otherwise inherits from it, and offers it by `megaopt_step_runner`: it may wrap the pieces
    before a precision policy sees them, make state in parts, step a part at a time, and call the step itself in its own
    way. Neither the precision policy nor the sharding strategy learns of it.

    Example:
        >>> class Counted(StepRunner):
        ...     steps = 0
        ...
        ...     def call(self, part, action):
        ...         self.steps += 1
        ...         super().call(part, action)
    """

    honours_noop: ClassVar[bool] = True
    """A step changes nothing where `found_inf` of the inner optimizer says so, which the host does not read."""

    _offloaded: Any = None
    """Brings states back from the CPU; None where they are not there."""

    _order: MemoryOrder | None = None

    def place(self, sharded: ShardedParams) -> ShardedParams:
        """Return the pieces as they are to be stepped; asked once, before anything is made for them.

        Args:
            sharded: what the strategy attached.
        """
        return sharded

    def init_state(
        self,
        inner: torch.optim.Optimizer,
        precision: PrecisionPolicy,
        stepped: Sequence[torch.Tensor],
        init_state_fn: InitState | None,
        config: OptimizerConfig,
    ) -> None:
        """Make the inner optimizer's state before its first step, or what stands in for it.

        Args:
            inner: the inner optimizer.
            precision: gives the tensors their memory.
            stepped: the tensor that is stepped for each piece.
            init_state_fn: what makes the state, or what it is declared to be; None: a plugin learns it. Where it is
                declared or learned, placeholders of that kind can be loaded into, and the first step makes the state
                itself. State that the class made when it was constructed stays as it is.
            config: the run's configuration.

        Raises:
            PluginNotInstalledError: there is no `init_state_fn`, and no plugin learns it.
        """
        if init_state_fn is not None and not isinstance(init_state_fn, DeclaredState):
            run_inner(precision, inner, lambda: init_state_fn(inner, config))
        else:
            constructed = {
                param: copy.deepcopy(state)
                for param, state in inner.state.items()
                if state and not isinstance(state, StatePlaceholder)
            }
            make = learned_state(inner) if init_state_fn is None else init_state_fn
            run_inner(precision, inner, lambda: make(inner, config))
            put_placeholders(inner)
            inner.state.update(constructed)

    def step(self, part: InnerPart, indices: Sequence[int]) -> None:
        """Step what the inner optimizer holds, and bring it into the pieces.

        Args:
            part: what is stepped.
            indices: positions of the pieces that the groups hold now.
        """
        for turn in self.turns(part, indices):
            with stage(part.config, "optimizer-inner-step"):
                self.call(part, part.inner.step)
            with stage(part.config, "optimizer-copy-main-to-model-params"):
                part.precision.write_back(turn)

    def turns(self, part: InnerPart, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yield positions of the pieces that are stepped together, while the groups hold them alone.

        Args:
            part: what is stepped.
            indices: positions of the pieces that the groups hold now.
        """
        yield indices

    def call(self, part: InnerPart, action: Callable[[], Any]) -> None:
        """Call the step of the inner optimizer on what its groups hold, with the memory that it needs.

        Args:
            part: what is stepped.
            action: the step.
        """
        if self._order is None:
            self._order = MemoryOrder()
        order, inner = self._order, part.inner

        def step() -> None:
            with order.kept(inner):
                action()

        run_inner(part.precision, inner, step)

    def switch_mode(self, part: InnerPart, action: Callable[[], Any]) -> None:
        """Call the inner optimizer's `train` or `eval`, and bring what it changes into the pieces.

        Args:
            part: what is switched.
            action: its method.
        """
        for turn in self.turns(part, range(len(part.pieces))):
            run_inner(part.precision, part.inner, action, store_all=True)
            part.precision.write_back(turn)

    def offload(self, part: InnerPart) -> None:
        """Bring states and main parameters to the CPU, until :meth:`restore`.

        Args:
            part: what is moved.

        Raises:
            PluginNotInstalledError: megaopt-device, which does this, is not installed.
        """
        if self._offloaded is None:
            self._offloaded = import_distribution(STEP_RUNNER, "optimizer.offload_to_cpu()").OffloadedPart()
            self._offloaded.leave(part)

    def restore(self, part: InnerPart) -> None:
        """Bring what :meth:`offload` moved back to where it was.

        Args:
            part: what is moved.
        """
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.come_back(part)

    def require_restored(self, what: str = "a step") -> None:
        """Raise where states were brought to the CPU and not back.

        Args:
            what: what needs them.

        Raises:
            UnsupportedOperationError: they are there.
        """
        if self._offloaded is not None:
            raise UnsupportedOperationError(
                f"{what} after offload_to_cpu() is not possible: call restore_from_cpu() first"
            )

    def unused_settings(self, part: InnerPart) -> Mapping[str, str]:
        """Return the settings of runs that change nothing here, each with the reason.

        Args:
            part: what is stepped.
        """
        return {}

    def places(self, part: InnerPart) -> Mapping[str, str]:
        """Return where the states of parameters lie, by name, for the report; those of the usual place may be missing.

        Args:
            part: what is stepped.
        """
        return {}


def step_runner(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> StepRunner:
    """Return what runs the steps of one inner optimizer.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry.
        name: its registered name.

    Raises:
        PluginNotInstalledError: a setting asks for another way of running than in place, and no plugin offers one.
        PluginError: two plugins offer one.
    """
    asked = [setting for setting in _ASKED_BY if getattr(config, setting)]
    if not asked:
        return StepRunner()
    registry = get_registry()
    found = registry.call_each("megaopt_step_runner", config=config, entry=entry, name=name)
    if not found:
        what = f"{asked[0]}=True"
        absent = registry.absent_plugin(what, what, STEP_RUNNER)
        raise absent or PluginError(f"{what}: {STEP_RUNNER} is installed, but offers no runner for {name!r}")
    if len(found) > 1:
        raise PluginError(f"two plugins would run the steps of {name!r}: {found[0][0]} and {found[1][0]}")
    runner = found[0][1]
    if not isinstance(runner, StepRunner):
        raise PluginError(
            f"{found[0][0]}: megaopt_step_runner returned {type(runner).__name__}; it must return a StepRunner"
        )
    return runner


def unused_by_runners(parts: Sequence[Any]) -> dict[str, str]:
    """Return the settings that no runner acts on, each with the reason that the first one gives.

    Args:
        parts: what is stepped, each with its `runner`.
    """
    first, *others = [part.runner.unused_settings(part) for part in parts if part.pieces] or [{}]
    return {name: why for name, why in first.items() if all(name in other for other in others)}
