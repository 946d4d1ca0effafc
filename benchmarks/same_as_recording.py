"""The record of a run of `benchmarks/same_as.py`: results, digests of values, and collectives in their order."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from same_as_models import named_params
from torch import nn
from torch.distributed.tensor import DTensor

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import MegaoptError

__all__ = ["Recorder", "recording"]

COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
)
"""Calls of `torch.distributed` by which ranks send each other something in a step."""

_DESCRIPTIONS = ("params", "param_names", "routed")
"""Keys of a saved group that no step reads: they say for a later load what was saved."""


class Recorder:
    """Notes what happened, in order, as plain data.

    Args:
        model: the model that is trained.
        optimizer: what steps it.
    """

    def __init__(self, model: nn.Module, optimizer: MegatronOptimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.entries: list[list[Any]] = []
        self.sent: list[str] = []

    def step(self, act: Callable[[], Any] | None = None) -> None:
        """Step, and note the result, all values, and what was sent.

        Args:
            act: what steps; None: the optimizer's `step`.
        """
        self.sent.clear()
        with recording(self.sent):
            try:
                result = _words((act or self.optimizer.step)())
            except MegaoptError as error:
                result = f"{type(error).__name__}: {error}"
        sent = list(self.sent)
        self.entries.append(["step", result, self.values(), sent])

    def values(self) -> dict[str, str]:
        """Return a digest of every parameter, and of this rank's part of every state."""
        found = {name: _digest(param) for name, param in named_params(self.model)}
        state = self.optimizer.state_dict()
        names = [name for group in state["param_groups"] for name in group["param_names"]]
        indices = [index for group in state["param_groups"] for index in group["params"]]
        for index, name in zip(indices, names, strict=True):
            for key, value in state["state"].get(index, {}).items():
                found[f"{name}/{key}"] = _digest(value)
        for group_name, group in enumerate(state["param_groups"]):
            settings = {key: _words(value) for key, value in group.items() if key not in _DESCRIPTIONS}
            found[f"group {group_name}"] = repr(sorted(settings.items()))
        return found


@contextmanager
def recording(sent: list[str]) -> Iterator[None]:
    """Note every collective that this rank takes part in, outermost calls only.

    Args:
        sent: where a line for each is put: name, numbers of elements and dtypes, operation, ranks.
    """
    depth = 0

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth == 0:
                sent.append(f"{name}({', '.join(_argument(value) for value in (*args, *kwargs.values()))})")
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return call

    present = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, function in present.items():
        _replace(name, noted(name, function))
    try:
        yield
    finally:
        for name, function in present.items():
            _replace(name, function)


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Put a function in both places where torch has it: `P2POp` takes only the one that its own module names."""
    setattr(dist, name, function)
    setattr(dist.distributed_c10d, name, function)


def _argument(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.numel()} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dist.ProcessGroup):
        return f"ranks {dist.get_process_group_ranks(value)}"
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, torch.Tensor) for each in value):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, (bool, int, dist.ReduceOp, dist.ReduceOp.RedOpType)):
        return str(value)
    return type(value).__name__


def _words(value: Any) -> Any:
    """Return plain data that is equal only where every bit is."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, torch.Tensor):
        return _digest(value)
    if isinstance(value, Mapping):
        return {str(key): _words(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_words(each) for each in value]
    return repr(value)


def _digest(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(_words(value))
    if hasattr(value, "chunks") and hasattr(value, "local"):
        parts = [value.local(index) for index in range(len(value.chunks))]
        places = [(chunk.offsets, chunk.sizes) for chunk in value.chunks]
        return repr([(place, _digest(part)) for place, part in zip(places, parts, strict=True)])
    local = value.to_local() if isinstance(value, DTensor) else value
    local = local.detach().contiguous()
    data = local.flatten().view(torch.uint8).numpy().tobytes() if local.numel() else b""
    return f"{local.dtype!s} {list(local.shape)} {hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]}"
