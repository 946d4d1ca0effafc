"""A run that goes on with another optimizer: from one of torch's or Megatron's to one of megaopt, of any kind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from megaopt_core import MegatronOptimizer
from megaopt_core.errors import ConfigurationError
from megaopt_trainers._megatron_midrun import OfMegatron, of_megatron

__all__ = ["TakenOver", "change_checkpoint", "take_over"]

_MAIN_PARAM = "main_param"
"""The state that holds a parameter's value in float32; a new optimizer has it from the model."""


@frozen
class TakenOver:
    """The parameters of a run that has changed its optimizer, by name; printed, it is two lines.

    Args:
        kept: those whose whole state goes on.
        anew: those with a state that the old optimizer does not have; they keep the settings of the new one.
    """

    kept: tuple[str, ...]
    anew: tuple[str, ...]

    def __str__(self) -> str:
        """Return the lines."""
        lines = ((self.kept, "goes on"), (self.anew, "begins anew"))
        return "\n".join(f"state of {len(names)} parameters {what}: {_few(names)}" for names, what in lines)


@torch.no_grad()
def take_over(optimizer: MegatronOptimizer, old: Any) -> TakenOver:
    """Go on in mid-run from the state of a torch optimizer, or of one of Megatron-core's, of the same parameters.

    Everything that both keep for a parameter is copied, by identity of the parameter: AdamW's moments and step counts
    go on in our adam, and in the part of muon that is Adam. Groups all of whose state goes on take over learning rates
    and other settings, too; groups of which some begins anew, such as Muon's matrices, keep their own. From an
    optimizer of Megatron's, main parameters in float32 go on as well, those of matrices that begin anew too; where its
    ranks share states out, this is a collective of them, and each holds whole states for as long as it lasts.

    Args:
        optimizer: the new one, built from the model.
        old: the old one, made from the same model as before and loaded with its checkpoint: a `torch.optim.Optimizer`
            (`old.load_state_dict`, or torch's `set_optimizer_state_dict`), or what Megatron-core's
            `get_megatron_optimizer` has built (its `load_checkpoint`). It is not changed.

    Returns:
        The names whose state goes on, and those whose state begins anew.

    Raises:
        ConfigurationError: the two step other parameters; nothing has been changed.
        StateDictError: a state does not fit; nothing has been changed.
        UnsupportedOperationError: whole tensors of Megatron's optimizer have owners; nothing has been changed.

    Example:
        >>> import torch
        >>> from megaopt_core import build_optimizer
        >>> from megaopt_trainers.midrun import take_over
        >>> model = torch.nn.Linear(4, 2)
        >>> old = torch.optim.AdamW(model.parameters(), lr=0.25)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> _ = old.step()
        >>> print(take_over(build_optimizer(model, "adam", lr=1.0), old))
        state of 2 parameters goes on: weight, bias
        state of 0 parameters begins anew: none
    """
    read = of_megatron(old)
    told = _load(optimizer, old if read is None else read)
    if read is not None and read.main_values:
        values = {name: read.main_values.get(param, param) for param, name in optimizer.names.items()}
        optimizer.reload_model_params(values)
    return told


def _load(optimizer: MegatronOptimizer, old: torch.optim.Optimizer | OfMegatron) -> TakenOver:
    members = [param for group in old.param_groups for param in group["params"] if param in old.state]
    unknown = sum(param not in optimizer.names for param in members)
    if unknown or not members:
        raise ConfigurationError(
            f"take_over(): {unknown} of the {len(members)} parameters with a state in the old optimizer are not "
            "stepped by the new one: make both from the same model, and load the old one's checkpoint first"
        )
    kept = {param: {key for key in old.state[param] if key in optimizer.state[param]} for param in members}
    lacking = {
        param
        for param, state in optimizer.state.items()
        if any(
            isinstance(state[key], torch.Tensor)
            for key in state
            if key != _MAIN_PARAM and key not in kept.get(param, ())
        )
    }
    groups, state, index = [], {}, 0
    for group in old.param_groups:
        params = [param for param in group["params"] if param in kept]
        places = range(index, index + len(params))
        index += len(params)
        names = [optimizer.names[param] for param in params]
        groups.append({**group, "params": list(places), "param_names": names})
        for place, param in zip(places, params, strict=True):
            if param not in lacking:
                state[place] = {key: old.state[param][key] for key in kept[param]}
    own = [
        (group, {key: value for key, value in group.items() if key not in ("params", "param_names")})
        for group in optimizer.param_groups
        if not lacking.isdisjoint(group["params"])
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups}, strict=False)
    for group, settings in own:
        for key in group.keys() - settings.keys() - {"params", "param_names"}:
            del group[key]  # such as the `initial_lr` of an old scheduler
        group.update(settings)
    named = optimizer.names.items()
    return TakenOver(
        kept=tuple(name for param, name in named if param in kept and param not in lacking),
        anew=tuple(name for param, name in named if param not in kept or param in lacking),
    )


def change_checkpoint(
    source: str | Path, target: str | Path, optimizer: MegatronOptimizer, old: torch.optim.Optimizer
) -> TakenOver:
    """Copy a checkpoint of Hugging Face's Trainer to one that a Trainer with another optimizer resumes.

    `optimizer.pt` and `scheduler.pt` are changed; everything else is copied. Groups that begin anew are where the
    schedule is: their learning rate has the same part of its own as that of the first old group.

    Args:
        source: the folder of the checkpoint, which is not changed.
        target: the folder that is made.
        optimizer: the new one, built from the checkpoint's model as the Trainer will build it. It takes over the state.
        old: the one that the Trainer has made for the same model, `Trainer(model, arguments).create_optimizer()`. It
            loads the checkpoint's state.

    Returns:
        The names whose state goes on, and those whose state begins anew.

    Raises:
        ConfigurationError: the source lacks a file, the target is there already, or the two step other parameters;
            nothing has been written.
    """
    source, target = Path(source), Path(target)
    files = source / "optimizer.pt", source / "scheduler.pt"
    lacking = [str(file) for file in files if not file.is_file()]
    if lacking or target.exists():
        words = f"{' and '.join(lacking)} missing" if lacking else f"{target} is there already"
        raise ConfigurationError(f"change_checkpoint(): {words}")
    state, schedule = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
    old.load_state_dict(state)
    told = take_over(optimizer, old)
    saved = optimizer.state_dict()
    begun = schedule["base_lrs"][0]
    part = schedule["_last_lr"][0] / begun if begun else 1.0
    for group in saved["param_groups"]:
        if "initial_lr" not in group:
            group.update(initial_lr=group["lr"], lr=group["lr"] * part)
    before, after = len(schedule["base_lrs"]), len(saved["param_groups"])
    for key, value in schedule.items():
        if isinstance(value, list) and len(value) == before:
            schedule[key] = value[:1] * after
    schedule["base_lrs"] = [group["initial_lr"] for group in saved["param_groups"]]
    schedule["_last_lr"] = [group["lr"] for group in saved["param_groups"]]
    shutil.copytree(source, target)
    torch.save(saved, target / "optimizer.pt")
    torch.save(schedule, target / "scheduler.pt")
    return told


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}" if names else "none"
