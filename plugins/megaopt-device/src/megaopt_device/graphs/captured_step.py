"""An inner step that is captured once and replayed from then on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define, field

from megaopt_core.errors import UnusedSettingWarning
from megaopt_core.execution import InnerPart, StepRunner
from megaopt_core.sharding import ShardedParams
from megaopt_device.graphs.capture import Capture, CudaCapture
from megaopt_device.graphs.held import addresses, host_values, settings_of, state_kinds
from megaopt_device.graphs.static import StaticStep

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, PrecisionPolicy
    from megaopt_core.plugin_api import InitState

__all__ = ["WARM_UP", "CapturedStep"]

WARM_UP = 3
"""Steps that are made eagerly before one is captured: libraries settle, and what a step does is watched."""

RECAPTURES = 8
"""Captures one after the other, each replayed less than twice, after which capturing is given up."""


type _Key = tuple[tuple[int, ...], bool]
"""Which pieces are stepped, and whether the step takes a clip factor."""


@define(eq=False)
class _Graph:
    """A captured step, or one that will be.

    Args:
        bound_to: what it holds as it is; another means another graph.
        step: what was captured.
        replay: repeats it; None: it is not captured yet.
        steps: that were made, eagerly or by replay.
    """

    bound_to: Any
    step: StaticStep | None = None
    replay: Callable[[], None] | None = None
    steps: int = 0
    replays: int = 0


@define(eq=False)
class CapturedStep(StepRunner):
    """Captures the step of an inner optimizer as a CUDA graph, and replays it; falls back where that cannot be.

    A graph is bound to memory and to numbers. Gradients are copied to where it reads them, unless they are there; the
    learning rate and the clip factor are tensors that are filled; all else (which parameters, their memory and that of
    their states, the other settings of groups) leads to a new capture where it changes.

    Args:
        name: the optimizer's registered name.
        capture: what captures; None: CUDA's graphs, where the parameters are on CUDA.
    """

    honours_noop: ClassVar[bool] = False

    name: str
    capture: Capture | None = None
    why_not: str | None = field(default=None, init=False)
    """Why steps are not captured; None while they are, or may be."""
    _graphs: dict[_Key, _Graph] = field(factory=dict, init=False)
    _rates: dict[int, torch.Tensor] = field(factory=dict, init=False)
    _scale: torch.Tensor | None = field(default=None, init=False)
    _in_vain: int = field(default=0, init=False)

    def place(self, sharded: ShardedParams) -> ShardedParams:
        """Find out whether there is a device that captures.

        Args:
            sharded: what the strategy attached.
        """
        devices = sorted({str(piece.param.device) for piece in sharded.pieces})
        if self.capture is None:
            if len(devices) != 1 or not devices[0].startswith("cuda"):
                self.why_not = (
                    f"parameters are on {' and '.join(devices) or 'no device'}, and CUDA captures for one"
                )
            else:
                self.capture = CudaCapture(torch.device(devices[0]))
        if sharded.exchange is not None:
            self.why_not = "its updates travel between ranks inside the step"
        return sharded

    def init_state(
        self,
        inner: torch.optim.Optimizer,
        precision: PrecisionPolicy,
        stepped: Sequence[torch.Tensor],
        init_state_fn: InitState | None,
        config: OptimizerConfig,
    ) -> None:
        """Let torch's optimizers count their steps on the device, and make the state.

        A class says by an attribute `why_not_captured`, in words, that a graph cannot repeat its step.

        Args:
            inner: the inner optimizer.
            precision: gives the tensors their memory.
            stepped: the tensor that is stepped for each piece.
            init_state_fn: what makes the state.
            config: the run's configuration.
        """
        if any(getattr(getattr(tensor, "param_info", None), "peers", None) for tensor in stepped) or (
            torch.distributed.is_initialized()
            and any(tensor.param_info.partition_dim >= 0 for tensor in stepped)  # type: ignore[attr-defined]
        ):
            self.why_not = self.why_not or "its ranks communicate inside the step"
        own = getattr(type(inner), "why_not_captured", None)
        if own is not None:
            self._give_up(own)
        if self.why_not is None and isinstance(self.capture, CudaCapture):
            for group in inner.param_groups:
                if "capturable" in group:
                    group["capturable"] = True
        super().init_state(inner, precision, stepped, init_state_fn, config)

    def unused_settings(self, part: InnerPart) -> Mapping[str, str]:
        """Return that nothing is captured, where that is known.

        Args:
            part: what is stepped.
        """
        return (
            {}
            if self.why_not is None
            else {"optimizer_cuda_graph": f"{self.name!r} is not captured: {self.why_not}"}
        )

    def call(self, part: InnerPart, action: Callable[[], Any]) -> None:
        """Step eagerly, capture, or replay: with the memory that a precision policy lends for it.

        Args:
            part: what is stepped.
            action: the inner optimizer's step.
        """
        whole = partial(super().call, part, action)
        held = {id(param) for group in part.inner.param_groups for param in group["params"]}
        indices = [index for index, tensor in enumerate(part.stepped) if id(tensor) in held]
        if self.why_not is not None or self.capture is None or not indices:
            whole()
            return
        missing = sum(part.precision.grad(index) is None for index in indices)
        if missing:
            self._give_up(
                f"{missing} of {len(indices)} parameters have no gradient, and a graph steps all of them"
            )
            whole()
            return
        self._step(part, indices, whole)

    def _step(self, part: InnerPart, indices: Sequence[int], whole: Callable[[], Any]) -> None:
        graph = self._graph_of(part, indices)
        with self._tensors_for_numbers(part, indices):
            if graph.replay is not None and graph.step is not None:
                graph.step.copy_grads()
                graph.replay()
                graph.replays += 1
            elif graph.steps < WARM_UP:
                self._warm_up(part, indices, whole, graph)
            elif not self._captured(StaticStep(part, indices, whole), graph):
                whole()
        graph.steps += 1

    def _graph_of(self, part: InnerPart, indices: Sequence[int]) -> _Graph:
        """Return the graph of what the groups hold now; a new one where something it is bound to has changed."""
        key = tuple(indices), hasattr(part.inner, "grad_scale")
        bound_to = (addresses(part, indices), settings_of(part.inner))
        graph = self._graphs.get(key)
        if graph is not None and graph.bound_to == bound_to:
            return graph
        if graph is not None and graph.replay is not None:
            self._in_vain = self._in_vain + 1 if graph.replays < 2 else 0
            if self._in_vain >= RECAPTURES:
                self._give_up(
                    f"{_changed(graph.bound_to, bound_to)} changes so often that graphs are hardly replayed"
                )
        # Once warm, what has changed is captured at once; the first state is made by the step itself.
        if graph is None:
            steps = WARM_UP if self._knows(indices) else 0
        else:
            steps = WARM_UP if graph.replay is not None else graph.steps
        graph = self._graphs[key] = _Graph(bound_to, steps=steps)
        return graph

    def _knows(self, indices: Sequence[int]) -> bool:
        """Whether these very pieces have been captured, with or without a clip factor."""
        return any(
            pieces == tuple(indices) and graph.replay is not None
            for (pieces, _), graph in self._graphs.items()
        )

    def _warm_up(
        self, part: InnerPart, indices: Sequence[int], whole: Callable[[], Any], graph: _Graph
    ) -> None:
        """Step eagerly, and see whether a replay would do the same."""
        assert self.capture is not None  # noqa: S101 - the caller asks first
        before, kinds = host_values(part.inner), state_kinds(part.inner)
        reason = self.capture.warm_up(whole)
        if graph.steps == 0:
            return  # the first step may make state
        after = host_values(part.inner)
        moved = sorted(key for key, value in after.items() if key not in before or before[key] != value)
        if moved:
            reason = f"a step changes what is kept on the host ({moved[0]}), which a graph does not repeat"
        elif state_kinds(part.inner) != kinds:
            reason = "a step puts tensors of another kind in the place of its states, or nests them anew"
        if reason is not None:
            self._give_up(reason)

    def _captured(self, step: StaticStep, graph: _Graph) -> bool:
        """Capture a step and replay it; return False where it cannot be captured, with nothing done."""
        if self.why_not is not None:
            return False
        assert self.capture is not None  # noqa: S101 - the caller asks first
        try:
            replay = step.attempt(self.capture.capture)
        except RuntimeError as error:
            first: BaseException = error
            while first.__context__ is not None:  # ending a capture that has failed fails too
                first = first.__context__
            self._give_up(f"capturing failed: {str(first).splitlines()[0]}")
            return False
        step.copy_grads()
        graph.step, graph.replay = step, replay
        replay()
        return True

    @contextmanager
    def _tensors_for_numbers(self, part: InnerPart, indices: Sequence[int]) -> Iterator[None]:
        """Let the step read learning rates and the clip factor from tensors, which are filled without a copy."""
        inner: Any = part.inner
        device = part.stepped[indices[0]].device
        rates = [group.get("lr") for group in inner.param_groups]
        for index, (group, rate) in enumerate(zip(inner.param_groups, rates, strict=True)):
            if rate is not None:
                held = self._rates.setdefault(index, torch.zeros((), dtype=torch.float32, device=device))
                # A number on the host goes along with the launch; to copy it, the device would be waited for.
                on_device = isinstance(rate, torch.Tensor) and rate.device == device
                held.copy_(rate) if on_device else held.fill_(float(rate))
                group["lr"] = held
        scale = getattr(inner, "grad_scale", None)
        if scale is not None:
            self._scale = torch.empty_like(scale) if self._scale is None else self._scale
            inner.grad_scale = self._scale.copy_(scale)
        try:
            yield
        finally:
            for group, rate in zip(inner.param_groups, rates, strict=True):
                if rate is not None:
                    group["lr"] = rate
            if scale is not None:
                inner.grad_scale = scale

    def _give_up(self, reason: str) -> None:
        if self.why_not is None:
            self.why_not = reason
            self._forget()
            warnings.warn(
                f"optimizer_cuda_graph=True: {self.name!r} is stepped without a graph from now on: {reason}",
                UnusedSettingWarning,
                stacklevel=2,
            )

    def offload(self, part: InnerPart) -> None:
        """Bring states to the CPU; graphs that are bound to their memory go, and the memory that they have themselves.

        Args:
            part: what is moved.
        """
        self._forget()
        super().offload(part)

    def _forget(self) -> None:
        self._graphs.clear()
        if self.capture is not None:
            self.capture.release()


def _changed(before: Any, after: Any) -> str:
    (_, settings), (_, others) = before, after
    for one, other in zip(settings, others, strict=True):
        for (key, value), (_, now) in zip(one, other, strict=False):
            if value != now:
                return f"{key!r} of a group"
    return "the memory of parameters or states"
