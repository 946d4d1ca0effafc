"""Building the inner torch optimizer of one child and making its state."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.constructor import constructor_kwargs
from megaopt_core.entries import OptimizerEntry
from megaopt_core.errors import PluginError

if TYPE_CHECKING:
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.optimizers.precision import PrecisionPolicy
    from megaopt_core.parallel.groups import ProcessGroupCollection

__all__ = ["build_inner", "init_state_by_step"]


def build_inner(
    entry: OptimizerEntry,
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    pgs: ProcessGroupCollection,
    settings: dict[str, Any],
    precision: PrecisionPolicy,
) -> torch.optim.Optimizer:
    """Return the inner optimizer with its state made.

    Args:
        entry: the optimizer's entry.
        groups: inner groups: `params` and the group's settings.
        config: the run's configuration.
        chunks: the model chunks.
        pgs: the process groups.
        settings: constructor settings that differ from the configuration's.
        precision: gives the tensors their memory while state is made.

    Raises:
        PluginError: the class refuses its arguments.
    """
    optimizer_cls = entry.load_class()
    kwargs = constructor_kwargs(entry, config, chunks, pgs, settings)
    try:
        inner = optimizer_cls([dict(group) for group in groups], **kwargs)
    except TypeError as error:
        raise PluginError(f"{optimizer_cls.__name__} does not take {sorted(kwargs)}: {error}") from error
    for _ in precision.batches(inner):
        if entry.init_state_fn is not None:
            entry.init_state_fn(inner, config)
        else:
            init_state_by_step(inner)
    return inner


@torch.no_grad()
def init_state_by_step(inner: torch.optim.Optimizer) -> None:
    """Make an optimizer's state by a step on zero gradients, then undo everything the step did to values.

    Learning rate and weight decay are zero during the step; parameters, gradients, groups and the random state are put
    back, step counts are set to zero, and so are state tensors that came out non-finite.

    Args:
        inner: an optimizer that has not stepped yet.
    """
    params = [param for group in inner.param_groups for param in group["params"]]
    if not params:
        return
    grads = [param.grad for param in params]
    values = [param.detach().clone() for param in params]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    kept = copy.deepcopy(settings)
    try:
        for group in inner.param_groups:
            for key in ("lr", "weight_decay"):
                if key in group:
                    group[key] = torch.zeros_like(group[key]) if isinstance(group[key], torch.Tensor) else 0.0
        for param in params:
            param.grad = torch.zeros_like(param)
        with torch.random.fork_rng(devices=[]):
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


def _reset(inner: torch.optim.Optimizer) -> None:
    for state in inner.state.values():
        for key, value in state.items():
            if key == "step":
                state[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)
            elif isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                state[key] = torch.zeros_like(value)
