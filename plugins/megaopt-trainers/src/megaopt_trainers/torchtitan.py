"""torchtitan: the optimizers that its configuration chooses in place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import tyro
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from megaopt_core import MegatronOptimizer, ParamKey, build_optimizer
from megaopt_core.errors import ConfigurationError
from megaopt_core.params import validate_override

__all__ = ["MegaoptOptimizers"]

_FIELDS = ("optimizer", "lr", "weight_decay", "overrides")
"""Settings that are fields of the configuration."""

_TITANS = {
    "param_groups": "overrides={'*.gate.weight': {'wd_mult': 0.0}} gives parameters settings of their own",
    "optimizer_factory_kwargs_by_name": "settings={...} takes any field of OptimizerConfig",
    "implementation": "each optimizer of megaopt chooses how it computes",
}
"""Fields of torchtitan's own containers, which say nothing to ours, to the way out."""


class MegaoptOptimizers(OptimizersContainer):  # type: ignore[misc,unused-ignore] # Any where it is missing
    """A container that steps all parts of a model with one optimizer of megaopt.

    torchtitan builds it from `Trainer.Config.optimizer`, after it has applied its parallelisms. Its schedulers write
    the learning rates of the groups, its checkpoint manager saves and loads the state by the names of parameters, and
    its trainer clips gradients (`training.max_norm`), so that `clip_grad` is 0 here unless `settings` has it. Its log
    gets the report of which optimizer steps what.

    Args:
        config: what to build.
        model_parts: the parts of the model that this rank has.

    Raises:
        MegaoptError: a setting, an override or the routing is not possible; nothing has been built.

    Example:
        >>> from megaopt_trainers.torchtitan import MegaoptOptimizers
        >>> config = MegaoptOptimizers.Config(optimizer="adam", lr=1e-3)
        >>> optimizers = config.build(model_parts=[torch.nn.Linear(4, 2)])
        >>> [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        [0.001, 0.001]
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc,unused-ignore] # the same
        """The choice in torchtitan's configuration.

        Args:
            optimizer: a registered name; `megaopt optimizers` lists them.
            lr: the learning rate, which the scheduler multiplies.
            weight_decay: decoupled weight decay, for matrices and tables.
            settings: any other field of :class:`megaopt_core.OptimizerConfig`, such as `{"muon_momentum": 0.95}`; the
                optimizer's own may be written without their prefix.
            overrides: glob of parameter names to their own settings, such as `{"*.gate.weight": {"wd_mult": 0.0}}`, in
                place of the standard ones; None: no weight decay on biases and vectors; `{}`: the same for all.
        """

        optimizer: str = "adam"
        lr: float = 8e-4
        weight_decay: float = 0.1
        settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        overrides: Annotated[dict[str, dict[str, Any]] | None, tyro.conf.Suppress] = None

    optimizers: list[MegatronOptimizer]

    def __init__(self, config: Config, *, model_parts: Sequence[torch.nn.Module]) -> None:
        _require_ours(config)
        given = config.overrides
        overrides = (
            None
            if given is None
            else {ParamKey(name=name): validate_override(values) for name, values in given.items()}
        )
        self.model_parts = list(model_parts)
        self.optimizers = [
            build_optimizer(
                self.model_parts,
                config.optimizer,
                overrides=overrides,
                fqn=_same_name,
                **{"clip_grad": 0.0, **config.settings, "lr": config.lr, "weight_decay": config.weight_decay},
            )
        ]
        logger.info("Optimizers of megaopt:\n%s", self.optimizers[0].report())
        params = [param for part in self.model_parts for param in part.parameters() if param.requires_grad]
        torch.optim.Optimizer.__init__(self, params, {})  # for the hooks that are registered on a container

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.distributed.checkpoint` saves it: by the names of parameters, cut as they are."""
        (optimizer,) = self.optimizers
        return optimizer.checkpoint_state().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `torch.distributed.checkpoint` has read.

        Args:
            state_dict: what :meth:`state_dict` returned, with the values that were read.
        """
        (optimizer,) = self.optimizers
        optimizer.checkpoint_state().load_state_dict(state_dict)


def _same_name(chunk: int, name: str) -> str:
    """Return the name itself: torchtitan's stages call layers what the whole model calls them."""
    return name


def _require_ours(config: MegaoptOptimizers.Config) -> None:
    """Raise for settings that would do nothing."""
    usual = OptimizersContainer.Config()
    for name, instead in _TITANS.items():
        given = getattr(config, name)
        if given != getattr(usual, name):
            raise ConfigurationError(
                f"{name}={given!r:.100} is for torchtitan's own optimizers; {instead}",
                setting=name,
                value=given,
            )
    for name in config.settings:
        if name in _FIELDS:
            raise ConfigurationError(
                f"settings has {name!r}, which is a field of the configuration: MegaoptOptimizers.Config({name}=...)",
                setting="settings",
                value=config.settings,
            )
