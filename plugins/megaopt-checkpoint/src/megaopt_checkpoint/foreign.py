"""State dicts of plain torch optimizers, imported by parameter name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import StateDictError
from megaopt_core.params import named_params, whole
from megaopt_core.state import (
    LoadPlan,
    LoadReport,
    Manifest,
    MemorySource,
    ModelTensors,
    Ranks,
    Rename,
    encode,
    is_elementwise,
    match,
    plan_optimizer,
    renamed,
    state_key,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["load_torch_state_dict"]


def load_torch_state_dict(
    optimizer: MegatronOptimizer,
    state_dict: Mapping[str, Any],
    *,
    param_names: Sequence[str] | None = None,
    model: torch.nn.Module | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> LoadReport:
    """Take states and step counts over from the state dict of a plain torch optimizer, such as AdamW or Muon.

    Names come from the state dict itself where the optimizer was made from `named_parameters()`, else from
    `param_names`, else from `model`. Settings (learning rate, betas...) are those of the configuration. A state dict
    holds whole tensors: with several ranks, each gives the same one and takes what it steps.

    Args:
        optimizer: what takes the state over.
        state_dict: `torch.optim.Optimizer.state_dict()`; it is not changed.
        param_names: the names of its parameters, in the order of its indices.
        model: the model whose `parameters()` the torch optimizer was made from; its frozen ones may be left out.
        rename: names in the state dict to names here.
        strict: names must be the same on both sides; False: what fits is loaded. Several optimizers' state dicts are
            taken over one after the other with `strict=False`.
        process_group: who loads together; None: everybody.

    Returns:
        What was loaded and what was not.

    Raises:
        StateDictError: it does not fit, or has no names; nothing has been changed.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_checkpoint import load_torch_state_dict
        >>> model = torch.nn.Linear(2, 1)
        >>> plain = torch.optim.AdamW(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> plain.step()
        >>> optimizer = build_optimizer(model, "adam", lr=0.1)
        >>> load_torch_state_dict(optimizer, plain.state_dict(), model=model).loaded
        ('bias', 'weight')
        >>> torch.equal(optimizer.state[model.weight]["exp_avg"], plain.state[model.weight]["exp_avg"])
        True
    """
    ranks = Ranks(process_group)
    source = ranks.agree(
        lambda: _source(state_dict, _names(state_dict, param_names, model), rename, optimizer)
    )
    found = match(source, ModelTensors(), False, optimizer, strict=strict, rename=rename, ranks=ranks)  # noqa: FBT003 - no model
    plan = LoadPlan(source, found.report, optimizer)
    ranks.agree(lambda: plan_optimizer(plan, found, optimizer))
    plan.groups.changes.clear()
    plan.apply(ranks)
    return plan.report


def _names(
    state_dict: Mapping[str, Any], given: Sequence[str] | None, model: torch.nn.Module | None
) -> dict[Any, str]:
    """Return index in the state dict to parameter name."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise StateDictError("an optimizer state dict has the keys 'state' and 'param_groups'")
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    if given is None and all("param_names" in group for group in state_dict["param_groups"]):
        given = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    elif given is None and indices and all(isinstance(index, str) for index in indices):
        given = indices
    elif given is None and model is not None:
        every = named_params(model)
        trainable = [entry for entry in every if entry.param.requires_grad]
        given = [entry.name for entry in (every if len(every) == len(indices) else trainable)]
    if given is None:
        raise StateDictError(
            "the state dict has no names: give param_names=[...] in the order of its indices, or model= if the torch "
            "optimizer was made from model.parameters()"
        )
    if len(given) != len(indices):
        raise StateDictError(
            f"{len(given)} names were given, the state dict has {len(indices)} parameters", names=given
        )
    return dict(zip(indices, given, strict=True))


def _source(
    state_dict: Mapping[str, Any],
    names: Mapping[Any, str],
    rename: Rename | None,
    optimizer: MegatronOptimizer,
) -> MemorySource:
    tensors: dict[str, torch.Tensor] = {}
    parameters: dict[str, Any] = {}
    for position, group in enumerate(state_dict["param_groups"]):
        for index in group["params"]:
            name = names[index]
            values = state_dict["state"].get(index, {})
            shape = _shape(name, values, rename, optimizer)
            scalars = _scalars(renamed(name, rename), optimizer)
            records = {
                key: _record(name, key, value, shape, tensors, scalars) for key, value in values.items()
            }
            parameters[name] = {"optimizer": None, "group": position, "shape": list(shape), "state": records}
    groups: list[dict[str, Any]] = [{"settings": {}, "configured": {}} for _ in state_dict["param_groups"]]
    manifest = Manifest(optimizer={"parameters": parameters, "groups": groups, "scaler": None})
    return MemorySource("the state dict", manifest, tensors)


def _shape(
    name: str, values: Mapping[str, Any], rename: Rename | None, optimizer: MegatronOptimizer
) -> tuple[int, ...]:
    """Return a parameter's shape: what it is here if some state has that, else that of the largest state."""
    here = renamed(name, rename)
    scalars = _scalars(here, optimizer)
    shapes = [
        tuple(v.shape) for key, v in values.items() if isinstance(v, torch.Tensor) and key not in scalars
    ]
    for part in optimizer.parts:
        for piece in part.pieces:
            for _, shard in piece.spec.members:
                if shard.name == here and (not shapes or shard.shape in shapes):
                    return shard.shape
    return max(shapes, key=math.prod, default=())


def _scalars(here: str, optimizer: MegatronOptimizer) -> frozenset[str]:
    """Return the state keys that are one number for a parameter; all that are in use where another rank steps it."""
    mine = [
        part.scalar_states
        for part in optimizer.parts
        if any(shard.name == here for piece in part.pieces for _, shard in piece.spec.members)
    ]
    return frozenset().union(*(mine or [part.scalar_states for part in optimizer.parts]))


def _record(
    name: str,
    key: str,
    value: Any,
    shape: tuple[int, ...],
    tensors: dict[str, torch.Tensor],
    scalars: frozenset[str],
) -> dict[str, Any]:
    if is_elementwise(key, value, shape, scalars):
        tensors[state_key(name, key)] = value.detach()
        return {"tensor": state_key(name, key)}
    if (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, torch.Tensor) and value.numel() == 1)
    ):
        return {"value": encode(value, {}, f"state {key!r} of {name!r}")}
    return {"objects": [[*whole(shape), encode(value, tensors, state_key(name, key))]]}
