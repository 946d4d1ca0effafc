"""A door for frameworks that call what a dotted path names with parameters and nothing else."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from megaopt_core import build_optimizer
from megaopt_core.errors import ConfigurationError

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer

__all__ = ["build_from_params"]


def build_from_params(
    params: Iterable[torch.nn.Parameter | Mapping[str, Any]], optimizer: str = "muon", **settings: Any
) -> MegatronOptimizer:
    """Build the optimizer of the model that parameters belong to, which is looked for among the living modules.

    Which parameter is an embedding or a norm is seen in the model alone. So the parameters must be all that train of
    one model; where the model is at hand, give it to :func:`megaopt_core.build_optimizer`.

    Args:
        params: the parameters, or groups of them without settings of their own.
        optimizer: a registered name.
        **settings: as for :func:`megaopt_core.build_optimizer`.

    Raises:
        ConfigurationError: no living module has just these parameters to train, or a group brings settings.

    Example:
        >>> import torch
        >>> from megaopt_fsdp import build_from_params
        >>> from megaopt_core.errors import ConfigurationError
        >>> try:
        ...     build_from_params([torch.nn.Parameter(torch.ones(2, 2))], "adam", lr=1e-3)
        ... except ConfigurationError as error:
        ...     print(str(error).partition(";")[0])
        1 parameters that train were given, and 0 living modules have all of them
    """
    return build_optimizer(_model_of(_flat(params)), optimizer, **settings)


def _flat(params: Iterable[torch.nn.Parameter | Mapping[str, Any]]) -> list[torch.nn.Parameter]:
    """Return the parameters of groups."""
    found: list[torch.nn.Parameter] = []
    for each in params:
        if not isinstance(each, Mapping):
            found.append(each)
            continue
        own = sorted(set(each) - {"params", "param_names"})
        if own:
            raise ConfigurationError(
                f"a group of parameters brings {', '.join(own)}; megaopt itself chooses the group of a parameter: "
                "give all parameters in one list, and different settings as overrides",
                setting="params",
            )
        found += each["params"]
    return found


def _model_of(params: list[torch.nn.Parameter]) -> torch.nn.Module:
    """Return the innermost living module that has all of some parameters, and trains no other."""
    wanted = {id(param) for param in params if param.requires_grad}
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    holding = [each for each in modules if wanted and wanted <= {id(param) for param in each.parameters()}]
    holding_ids = {id(each) for each in holding}
    inner = [each for each in holding if not holding_ids.intersection(map(id, each.children()))]
    if len(inner) != 1:
        raise ConfigurationError(
            f"{len(wanted)} parameters that train were given, and {len(inner)} living modules have all of them; give "
            "the model itself to megaopt_core.build_optimizer",
            setting="params",
        )
    others = [
        name for name, param in inner[0].named_parameters() if param.requires_grad and id(param) not in wanted
    ]
    if others:
        raise ConfigurationError(
            f"{type(inner[0]).__name__} trains {', '.join(others[:5])} too, which params does not have: freeze it "
            "(requires_grad_(False)), or give the model itself to megaopt_core.build_optimizer",
            setting="params",
        )
    model: torch.nn.Module = inner[0]
    return model
