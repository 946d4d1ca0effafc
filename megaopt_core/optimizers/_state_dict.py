"""State dicts in torch's schema, with parameter names; loading is by name, in place, all or nothing.

Main parameters start from a model's state dict, which may be more precise than the model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core.errors import MegaoptError, StateDictError
from megaopt_core.optimizers._param_state import ParamState
from megaopt_core.params._names import without_wrappers
from megaopt_core.precision._policy import MAIN_PARAM
from megaopt_core.state._document import ROUTED, STEPPED, routed_of
from megaopt_core.state._ranks import ALONE
from megaopt_core.state._restore.matching import LoadedBeside, match
from megaopt_core.state._restore.plan import keep_frozen, plan_load
from megaopt_core.state._torch_schema.left_out import with_left_out
from megaopt_core.state._torch_schema.over_ranks import (
    brought_to_ranks,
    names_of_slices,
    refused_together,
    with_states_of_all,
)
from megaopt_core.state._torch_schema.rearranged import names_of_listed, require_told
from megaopt_core.state._torch_schema.source import lacking_state, names_in, torch_source

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer

__all__ = ["export_state_dict", "import_state_dict", "model_values", "start_main_value"]

_SCALER = "grad_scaler"
_FRESH = "fresh"
"""Names of the parameters whose state, before their first step, is only a place to load into."""


def export_state_dict(optimizer: MegatronOptimizer) -> dict[str, Any]:
    """Return `{"state": {index: {...}}, "param_groups": [...]}`, tensors not copied.

    Args:
        optimizer: a built optimizer.
    """
    groups, state, index = [], {}, 0
    routed = routed_of(optimizer)
    cut = optimizer.state.cut_names()
    sliced = names_of_slices(optimizer).union(cut)
    for position, group in enumerate(optimizer.param_groups):
        packed = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        packed["params"] = list(range(index, index + len(group["params"])))
        packed["param_names"] = [optimizer.names[param] for param in group["params"]]
        if routed:
            packed[ROUTED] = routed[position]
        for param in group["params"]:
            kept, as_slices = optimizer.state[param], optimizer.names[param] in sliced
            state[index] = {key: _exported(kept, key, as_slices=as_slices) for key in kept}
            index += 1
        groups.append(packed)
    exported: dict[str, Any] = {"state": state, "param_groups": groups}
    if optimizer.grad_scaler is not None:
        exported[_SCALER] = optimizer.grad_scaler.state_dict()
    fresh = [optimizer.names[param] for param, values in optimizer.state.items() if values.is_fresh]
    if routed:
        named = zip((name for group in groups for name in group["param_names"]), state.values(), strict=True)
        stepped = "\n".join(name for name, values in named if values and name not in fresh)
        for group in groups:
            group[ROUTED][STEPPED] = stepped
    if fresh:
        exported[_FRESH] = fresh
    return with_states_of_all(optimizer, exported, cut)


def _exported(kept: Mapping[str, Any], key: str, *, as_slices: bool) -> Any:
    """Return a state as a state dict has it.

    A main parameter is a plain tensor of the same memory there: what is attached to it must not be pickled.
    """
    part = kept.sliced(key) if as_slices and isinstance(kept, ParamState) else None
    if part is not None:
        return part
    value = kept.read(key) if isinstance(kept, ParamState) else kept[key]
    return value.detach() if isinstance(value, torch.nn.Parameter) else value


def import_state_dict(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Copy a state dict into an optimizer, after all of it has been checked.

    Args:
        optimizer: a built optimizer.
        state_dict: what :func:`export_state_dict` returned, or torch's own.
        strict: names must be the same on both sides.

    Raises:
        StateDictError: it does not fit; nothing has been changed.
    """
    names = names_in(state_dict)
    names = names_of_listed(state_dict, optimizer.watched_model.called(optimizer.names)) or names
    if names is None:
        names = _by_position(optimizer, state_dict)
    state_dict = brought_to_ranks(optimizer, state_dict, names)
    try:
        if strict:
            state_dict = with_left_out(optimizer, state_dict, names)
        source = torch_source(optimizer, state_dict, names)
        if optimizer.late is not None and optimizer.late.keepable().keys() & set(names):
            keep_frozen(match(source, optimizer, LoadedBeside(), strict=strict, ranks=ALONE), optimizer)
            source = torch_source(optimizer, state_dict, names)
        plan = plan_load(source, optimizer, strict=strict, ranks=ALONE)
        if strict:
            require_told(state_dict["param_groups"], names)
            _require_state(optimizer, source.manifest.parameters, lacking_state(state_dict, names))
    except MegaoptError as error:
        # It raises, when the ranks that have the rest of the tensors have heard of it.
        refused_together(optimizer, error)
        raise
    refused_together(optimizer, None)
    plan.apply(ALONE)
    for param, name in optimizer.names.items():
        record = source.manifest.parameters.get(name)
        if record and MAIN_PARAM not in record["state"]:
            # A plain optimizer's state: the model's parameter is the only value there is.
            start_main_value(optimizer, param, param)


def _by_position(optimizer: MegatronOptimizer, state_dict: Mapping[str, Any]) -> list[str]:
    """Return names for a state dict without any: of groups like ours, or of one group of the model's parameters."""
    ours = [[optimizer.names[param] for param in group["params"]] for group in optimizer.param_groups]
    sizes, theirs = (
        [len(names) for names in ours],
        [len(group["params"]) for group in state_dict["param_groups"]],
    )
    mine = [name for names in ours for name in names]
    if theirs == sizes:
        return mine
    known = set(mine)
    in_order = (
        [] if optimizer.routing is None else [name for name in optimizer.routing.params if name in known]
    )
    if theirs == [len(known)] == [len(in_order)]:  # of `model.parameters()`, all of which are stepped here
        return in_order
    raise StateDictError(
        f"the state dict has {sum(theirs)} parameters without names, in groups of {', '.join(map(str, theirs))}; this "
        f"optimizer has {len(known)}, in groups of {', '.join(map(str, sizes))}. Without names only the position can "
        "match them: build both with the same groups, save one that has param_names (a torch.optim class has them when "
        "it is given model.named_parameters()), or give all trainable parameters of the model as one group"
    )


def _require_state(
    optimizer: MegatronOptimizer, records: Mapping[str, Mapping[str, Any]], lacking: Collection[str]
) -> None:
    """Raise where a state dict lacks the state of a parameter: it has been stepped here, or was where it is from."""
    stepped = any(part.changes.has_step for part in optimizer.parts)
    for param, name in optimizer.names.items():
        asked = (stepped or name in lacking) and param.numel()
        if not asked or records[name]["state"] or "fresh" in records[name]:
            continue
        kept = {key for key, value in optimizer.state[param].items() if isinstance(value, torch.Tensor)}
        if not kept - {MAIN_PARAM}:
            continue
        words = (
            f"the state dict lacks the state of {name!r}, as that of one rank lacks what other ranks keep: load on all "
            "ranks what save_checkpoint() or torch.distributed.checkpoint has saved"
            if name in lacking
            else f"the state dict has no state of {name!r}, which has been stepped here"
        )
        raise StateDictError(f"{words}; strict=False leaves what this optimizer has", names=[name])


def model_values(
    optimizer: MegatronOptimizer, state_dict: Mapping[str, Any]
) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Return what a model's state dict has for the parameters of an optimizer.

    Args:
        optimizer: a built optimizer.
        state_dict: parameter name to value; names may have prefixes that wrappers put in.

    Raises:
        StateDictError: it lacks a parameter, or has another shape of one.
    """
    if not isinstance(state_dict, Mapping):
        raise StateDictError(
            f"reload_model_params(state_dict): a mapping of parameter names to tensors, got {type(state_dict).__name__}"
        )
    known = set(optimizer.names.values())
    values = {without_wrappers(name): value for name, value in state_dict.items()}
    values.update((name, value) for name, value in state_dict.items() if name in known)
    missing = [name for name in optimizer.names.values() if name not in values]
    if missing:
        raise StateDictError(
            f"reload_model_params(state_dict): it lacks {len(missing)} parameters, such as {', '.join(missing[:3])}",
            names=missing,
        )
    for param, name in optimizer.names.items():
        value = values[name]
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise StateDictError(
                f"reload_model_params(state_dict): {name!r} is {given} there and of shape {tuple(param.shape)} in the "
                "model",
                names=[name],
            )
    return {param: values[name] for param, name in optimizer.names.items()}


@torch.no_grad()
def start_main_value(optimizer: MegatronOptimizer, param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Set the main value of one parameter, where this rank steps some of it.

    Args:
        optimizer: a built optimizer.
        param: the model's parameter.
        value: this rank's part of the new value, or all of it.
    """
    state = optimizer.state[param]
    if isinstance(state, ParamState):
        entry = None if optimizer.routing is None else optimizer.routing.params.get(optimizer.names[param])
        state.take_model(value, None if entry is None else entry.box)
