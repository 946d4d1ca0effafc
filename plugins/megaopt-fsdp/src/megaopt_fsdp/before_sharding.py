"""A door for frameworks that shard a model after its optimizer was built, and switch parameters in its groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from megaopt_core import build_optimizer
from megaopt_core.optimizers import MegatronOptimizer
from megaopt_core.params import is_dtensor

__all__ = ["build_before_sharding"]

_OF_MEMBERS = ("params", "param_names")
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def build_before_sharding(
    model: torch.nn.Module, optimizer: str = "muon", **settings: Any
) -> MegatronOptimizer:
    """Build an optimizer that is built anew once the parameters in its groups have become DTensors.

    accelerate, and the Trainer of Hugging Face on it, want an optimizer of the whole model, apply `fully_shard`, and
    put the DTensors into the optimizer's groups. Where this happens, groups, routing and state are made again for the
    model as it is then; learning rates and other settings of the groups stay. Where it does not, this is
    :func:`megaopt_core.build_optimizer`.

    Args:
        model: the model that will be sharded, in place.
        optimizer: a registered name.
        **settings: as for :func:`megaopt_core.build_optimizer`.

    Example:
        >>> import torch
        >>> from megaopt_fsdp import build_before_sharding
        >>> optimizer = build_before_sharding(torch.nn.Linear(4, 2), "adam", lr=1e-3)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.001, 0.001]
    """
    built = build_optimizer(model, optimizer, **settings)
    cls = type(built)
    built.__class__ = type(
        cls.__name__, (_Following, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__}
    )
    built.__dict__["rebuild"] = partial(build_optimizer, model, optimizer, **settings)
    return built


class _Following(MegatronOptimizer):
    """An optimizer until the parameters in its groups are switched; then it becomes the one of these."""

    rebuild: Callable[[], MegatronOptimizer]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; of the sharded model as soon as they hold its parameters."""
        groups = self._groups
        first = next((param for group in groups for param in group["params"]), None)
        if first is not None and is_dtensor(first) and first not in self.names:
            self._become(self.rebuild())
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def _become(self, built: MegatronOptimizer) -> None:
        """Take over everything that another optimizer is; whoever holds this one holds that one now."""
        before = {param: group for group in self._groups for param in group["params"]}
        for group in built.param_groups:
            present: dict[str, Any] = next(
                (before[param] for param in group["params"] if param in before), {}
            )
            group.update((key, value) for key, value in present.items() if key not in _OF_MEMBERS)
        built.__dict__.update((hooks, self.__dict__[hooks]) for hooks in _HOOKS)
        self.__class__ = type(built)  # type: ignore[assignment] # what it was made of
        self.__dict__ = built.__dict__
