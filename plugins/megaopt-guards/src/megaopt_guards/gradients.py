"""The gradients that replicas are about to step with: which there are, and whether they are the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from megaopt_core import MegatronOptimizer
from megaopt_core.params import is_dtensor
from megaopt_core.sharding import has_gradient, known_wrappers, reducer_of
from megaopt_guards.fingerprints import is_of_experts
from megaopt_guards.replicated_values import ReplicatedValue, ReplicatedValues

__all__ = [
    "GRADIENT",
    "UNREDUCED",
    "Compared",
    "compared_params",
    "gradients_that_were",
    "present_gradients",
    "unreduced_gradients",
]

GRADIENT = "gradient of parameter"
"""The first words of a difference between gradients."""

UNREDUCED = (
    "Gradients look unreduced: every rank has a main_grad of its own. Reduce them over these ranks before the step "
    "(finish_grad_sync() of their wrapper, torch.distributed.all_reduce). A wrapper that leaves each rank its share, "
    "as Megatron-core's DistributedDataParallel does with use_distributed_optimizer=True, is made with "
    "use_distributed_optimizer=False, or replaced by megaopt's DistributedDataParallel"
)

_THERE_IS_ONE = "there is one"

type Compared = list[tuple[torch.nn.Parameter, str, tuple[ProcessGroup, ...]]]


def compared_params(optimizer: MegatronOptimizer) -> Compared:
    """Return the parameters of which all replicas have a gradient in a step, or none: with names and replicas' groups.

    Those of experts are left out, and those whose wrapper gives a gradient to all: torch's, FSDP, or one of ours.

    Args:
        optimizer: steps them.
    """
    modules = [module for chunk in optimizer.watched_model.alive() for module in chunk.modules()]
    reduced = _params_in(module for module in modules if _is_torchs(module))
    return [
        each
        for each in _of_unknown_reducer(optimizer)
        if id(each[0]) not in reduced and not is_of_experts(optimizer, each[0], each[1])
    ]


def _of_unknown_reducer(optimizer: MegatronOptimizer) -> Compared:
    """Return the parameters with replicas of which nobody says who reduces their gradients."""
    values = ReplicatedValues(optimizer, optimizer.process_groups)
    wrappers = (one.wrapper for chunk in optimizer.watched_model.alive() for one in known_wrappers(chunk))
    reduced = _params_in(each for each in wrappers if isinstance(each, torch.nn.Module))
    return [
        (param, name, groups)
        for param, name in optimizer.names.items()
        if reducer_of(param) is None and id(param) not in reduced
        if (groups := values.groups_of_stepped(name, param, with_tensor=False))
    ]


def _params_in(modules: Iterable[torch.nn.Module]) -> set[int]:
    return {id(param) for module in modules for param in module.parameters()}


def _is_torchs(module: torch.nn.Module) -> bool:
    """Return whether a module is a wrapper of torch's that reduces gradients."""
    return isinstance(module, DistributedDataParallel) or type(module).__name__ == "FullyShardedDataParallel"


def present_gradients(compared: Compared) -> list[ReplicatedValue]:
    """Return the present gradients of some parameters.

    Args:
        compared: the parameters.
    """
    return [
        ReplicatedValue(f"{GRADIENT} {name!r}", _comparable(param), groups)
        for param, name, groups in compared
    ]


def gradients_that_were(compared: Compared, without: Collection[str]) -> list[ReplicatedValue]:
    """Return which of some parameters had a gradient in a step that is over.

    Args:
        compared: the parameters.
        without: names of those that had none.
    """
    return [
        ReplicatedValue(f"{GRADIENT} {name!r}", None if name in without else _THERE_IS_ONE, groups)
        for _, name, groups in compared
    ]


def unreduced_gradients(optimizer: MegatronOptimizer) -> list[ReplicatedValue]:
    """Return every `main_grad` of which nobody says who reduces it.

    Args:
        optimizer: steps them.
    """
    found = _of_unknown_reducer(optimizer)
    return present_gradients([each for each in found if getattr(each[0], "main_grad", None) is not None])


def _comparable(param: torch.nn.Parameter) -> Any:
    """Return a gradient, or in a word that there is one: a part of one, or one that is yet to be reduced."""
    if not has_gradient(param):
        return None
    main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
    grad = param.grad if main_grad is None else main_grad
    return _THERE_IS_ONE if grad is None or is_dtensor(grad) or grad.layout is not torch.strided else grad
