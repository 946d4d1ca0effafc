"""An inner step that is captured once and replayed from then on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from megaopt_core.errors import UnusedSettingWarning
from megaopt_core.execution import InnerPart, StepRunner
from megaopt_core.sharding import ShardedParams
from megaopt_device.graphs.capture import Capture, CudaCapture
from megaopt_device.graphs.held import addresses, host_values, settings_of

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, PrecisionPolicy
    from megaopt_core.plugin_api import InitState

__all__ = ["WARM_UP", "CapturedStep"]

WARM_UP = 3
"""Steps that are made eagerly before one is captured: libraries settle, and what a step does is watched."""

RECAPTURES = 8
"""Captures one after the other, each replayed less than twice, after which capturing is given up."""


@define(eq=False)
class _Graph:
    """A captured step, or one that will be.

    Args:
        bound_to: what it holds as it is; another means another graph.
        grads: where it reads gradients.
        replay: repeats it; None: it is not captured yet.
        steps: that were made, eagerly or by replay.
    """

    bound_to: Any
    grads: list[torch.Tensor] = field(factory=list)
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

    name: str
    capture: Capture | None = None
    why_not: str | None = field(default=None, init=False)
    """Why steps are not captured; None while they are, or may be."""
    _graphs: dict[tuple[int, ...], _Graph] = field(factory=dict, init=False)
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
        if self.why_not is None and part.pieces and _is_lent(part):
            self.why_not = "the precision policy gives parameters their memory during a step only"
        return (
            {}
            if self.why_not is None
            else {"optimizer_cuda_graph": f"{self.name!r} is not captured: {self.why_not}"}
        )

    def call(self, part: InnerPart, action: Callable[[], Any]) -> None:
        """Step eagerly, capture, or replay.

        Args:
            part: what is stepped.
            action: the inner optimizer's step.
        """
        if self.why_not is None and self.capture is not None:
            super().call(part, lambda: self._step(part.inner, action))
        else:
            super().call(part, action)

    def _step(self, inner: torch.optim.Optimizer, action: Callable[[], Any]) -> None:
        params = [param for group in inner.param_groups for param in group["params"]]
        if not params:
            action()
            return
        missing = sum(param.grad is None for param in params)
        if missing:
            self._give_up(
                f"{missing} of {len(params)} parameters have no gradient, and a graph steps all of them"
            )
            action()
            return
        graph = self._graph_of(inner, params)
        with self._tensors_for_numbers(inner):
            if graph.replay is not None:
                self._copy_grads(params, graph)
                graph.replay()
                graph.replays += 1
            elif graph.steps < WARM_UP:
                self._warm_up(inner, action, graph)
            elif not self._captured(params, action, graph):
                action()
        graph.steps += 1

    def _graph_of(self, inner: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> _Graph:
        """Return the graph of what the groups hold now; a new one where something it is bound to has changed."""
        key = tuple(map(id, params))
        bound_to = (addresses(inner), settings_of(inner), hasattr(inner, "grad_scale"))
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
        warm = 0 if graph is None or graph.replay is None else WARM_UP
        steps = warm if graph is None or graph.replay is not None else graph.steps
        graph = self._graphs[key] = _Graph(bound_to, steps=steps)
        return graph

    def _warm_up(self, inner: torch.optim.Optimizer, action: Callable[[], Any], graph: _Graph) -> None:
        """Step eagerly, and see whether a replay would do the same."""
        assert self.capture is not None  # noqa: S101 - the caller asks first
        before, memory = host_values(inner), addresses(inner)
        self.capture.warm_up(action)
        if graph.steps == 0:
            return  # the first step may make state
        after = host_values(inner)
        moved = sorted(key for key, value in after.items() if key not in before or before[key] != value)
        if moved:
            self._give_up(
                f"a step changes what is kept on the host ({moved[0]}), which a graph does not repeat"
            )
        elif addresses(inner) != memory:
            self._give_up(
                "a step puts new tensors in the place of its states, where a graph goes on with the old ones"
            )

    def _captured(self, params: Sequence[torch.Tensor], action: Callable[[], Any], graph: _Graph) -> bool:
        """Capture a step and replay it; return False where it cannot be captured, with nothing done."""
        if self.why_not is not None:
            return False
        assert self.capture is not None  # noqa: S101 - the caller asks first
        graph.grads = [torch.empty_like(param.grad) for param in params]  # type: ignore[arg-type] # all have one
        own = [param.grad for param in params]
        _set_grads(params, graph.grads)
        try:
            replay = self.capture.capture(action)
        except RuntimeError as error:
            self._give_up(f"capturing failed: {str(error).splitlines()[0]}")
            return False
        finally:
            _set_grads(params, own)
        self._copy_grads(params, graph)
        graph.replay = replay
        replay()
        return True

    def _copy_grads(self, params: Sequence[torch.Tensor], graph: _Graph) -> None:
        pairs = [
            (target, param.grad)
            for target, param in zip(graph.grads, params, strict=True)
            if param.grad is not None and param.grad.data_ptr() != target.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [grad for _, grad in pairs])

    @contextmanager
    def _tensors_for_numbers(self, inner: Any) -> Iterator[None]:
        """Let the step read learning rates and the clip factor from tensors, which are filled without a copy."""
        device = next(param.device for group in inner.param_groups for param in group["params"])
        rates = [group.get("lr") for group in inner.param_groups]
        for index, (group, rate) in enumerate(zip(inner.param_groups, rates, strict=True)):
            if rate is not None:
                held = self._rates.setdefault(index, torch.zeros((), dtype=torch.float32, device=device))
                held.copy_(rate) if isinstance(rate, torch.Tensor) else held.fill_(rate)
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
            self._graphs.clear()
            warnings.warn(
                f"optimizer_cuda_graph=True: {self.name!r} is stepped without a graph from now on: {reason}",
                UnusedSettingWarning,
                stacklevel=2,
            )

    def offload(self, part: InnerPart) -> None:
        """Bring states to the CPU; graphs that are bound to their memory go.

        Args:
            part: what is moved.
        """
        self._graphs.clear()
        super().offload(part)


def _set_grads(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


def _is_lent(part: InnerPart) -> bool:
    """Whether tensors have no memory of their own between steps."""
    return any(0 in tensor.stride() and tensor.numel() > 1 for tensor in part.stepped)


def _changed(before: Any, after: Any) -> str:
    (_, settings, _), (_, others, _) = before, after
    for one, other in zip(settings, others, strict=True):
        for (key, value), (_, now) in zip(one, other, strict=False):
            if value != now:
                return f"{key!r} of a group"
    return "the memory of parameters or states"
