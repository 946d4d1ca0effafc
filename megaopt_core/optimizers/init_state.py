"""Making the state of an optimizer that says nothing about how: by a step that leaves no trace."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable

import torch

from megaopt_core.errors import PluginError

__all__ = ["init_state_by_step"]


@torch.no_grad()
def init_state_by_step(inner: torch.optim.Optimizer) -> None:
    """Make an optimizer's state by a step on zero gradients, then undo everything the step did to values.

    Learning rate and weight decay are zero during the step; parameters, gradients, groups and the random state are put
    back, step counts are set to zero, and so are state tensors that came out non-finite.

    Args:
        inner: an optimizer that has not stepped yet.

    Raises:
        PluginError: its step needs a closure: it evaluates the model several times a step, which no pipeline of norm,
            clip and step can do.
    """
    _refuse_closures(inner)
    params = [param for group in inner.param_groups for param in group["params"]]
    if not params:
        return
    grads = [param.grad for param in params]
    values = [param.detach().clone() for param in params]
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in inner.param_groups
    ]
    kept = copy.deepcopy(settings)
    try:
        for group in inner.param_groups:
            for key in ("lr", "weight_decay"):
                if key in group:
                    is_tensor = isinstance(group[key], torch.Tensor)
                    group[key] = torch.zeros_like(group[key]) if is_tensor else 0.0
        for param in params:
            param.grad = torch.zeros_like(param)
        with torch.random.fork_rng(devices=_accelerators(params)):
            inner.step()
    finally:
        for param, grad, value in zip(params, grads, values, strict=True):
            param.grad = grad
            param.copy_(value)
        for group, saved in zip(inner.param_groups, kept, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update(saved)
    _reset(inner)


def _refuse_closures(inner: torch.optim.Optimizer) -> None:
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PluginError(
            f"{type(inner).__name__}.step needs a closure: it evaluates the model several times a step, and megaopt "
            "collects, clips and steps once"
        )


def _accelerators(params: Iterable[torch.Tensor]) -> list[torch.device]:
    return sorted({param.device for param in params if param.device.type == "cuda"}, key=str)


def _reset(inner: torch.optim.Optimizer) -> None:
    for state in inner.state.values():
        for key, value in state.items():
            if key == "step":
                state[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
            elif (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and not bool(torch.isfinite(value).all())
            ):
                state[key] = torch.zeros_like(value)
