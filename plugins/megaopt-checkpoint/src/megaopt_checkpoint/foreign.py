"""State dicts of plain torch optimizers, imported by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megaopt_checkpoint.planning import plan_checkpoint
from megaopt_checkpoint.ranks import Ranks
from megaopt_checkpoint.renaming import renamed
from megaopt_checkpoint.state_dicts.source import torch_source
from megaopt_core.errors import StateDictError
from megaopt_core.params import named_params
from megaopt_core.state import names_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_checkpoint.load_report import LoadReport
    from megaopt_checkpoint.renaming import Rename
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
        lambda: torch_source(
            optimizer, state_dict, _names(state_dict, param_names, model), lambda name: renamed(name, rename)
        )
    )
    plan, report = plan_checkpoint(source, None, optimizer, strict=strict, rename=rename, ranks=ranks)
    plan.groups.changes.clear()
    plan.apply(ranks)
    return report


def _names(
    state_dict: Mapping[str, Any], given: Sequence[str] | None, model: torch.nn.Module | None
) -> Sequence[str]:
    """Return the names of a state dict's parameters, in the order of its groups."""
    said = names_in(state_dict)
    given = said if given is None else given
    count = sum(len(group["params"]) for group in state_dict["param_groups"])
    if given is None and model is not None:
        every = named_params(model)
        trainable = [entry for entry in every if entry.param.requires_grad]
        given = [entry.name for entry in (every if len(every) == count else trainable)]
    if given is None:
        raise StateDictError(
            "the state dict has no names: give param_names=[...] in the order of its indices, or model= if the torch "
            "optimizer was made from model.parameters()"
        )
    if len(given) != count:
        raise StateDictError(
            f"{len(given)} names were given, the state dict has {count} parameters", names=given
        )
    return given
