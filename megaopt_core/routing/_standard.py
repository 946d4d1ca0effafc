"""The overrides that follow from the configuration alone: weight decay, decoupled learning rate, muP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.errors import ConfigurationError
from megaopt_core.params._keys import ParamKey, ParamPredicate, ParamWithNamePredicate
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._roles import Role
from megaopt_core.registry._registry import get_registry

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig

__all__ = ["get_mup_config_overrides", "get_standard_config_overrides", "scaled_learning_rate"]

_EMBEDDING_OR_OUTPUT = ParamKey(attr="is_embedding_or_output_parameter", role=(Role.EMBEDDING, Role.OUTPUT))


def _no_decay(param: torch.nn.Parameter) -> bool:
    return param.dim() < 2


def _no_decay_outside_qk_layernorm(param: torch.nn.Parameter, name: str) -> bool:
    vector = param.dim() < 2 or name.endswith(".bias")
    return vector and "q_layernorm." not in name and "k_layernorm." not in name


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides that apply when `config_overrides` is None.

    No weight decay on biases and on parameters with fewer than two dimensions (with
    `apply_wd_to_qk_layernorm`, query and key layer norms do decay); `decoupled_lr` for embeddings and output heads.

    Args:
        config: the run's configuration.

    Returns:
        A new dictionary that the caller may extend.
    """
    if config.apply_wd_to_qk_layernorm:
        no_decay = ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                name="vector_or_bias_outside_qk_layernorm", fn=_no_decay_outside_qk_layernorm
            )
        )
    else:
        no_decay = ParamKey(
            name="*.bias", predicate=ParamPredicate(name="fewer_than_2_dimensions", fn=_no_decay)
        )
    overrides = {no_decay: ParamGroupOverride(wd_mult=0.0)}
    if config.decoupled_lr is not None:
        decoupled = ParamGroupOverride(max_lr=config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            decoupled["min_lr"] = config.decoupled_min_lr
        overrides[_EMBEDDING_OR_OUTPUT] = decoupled
    return overrides


def scaled_learning_rate(config: OptimizerConfig, factor: float) -> ParamGroupOverride:
    """Return an override that multiplies the configuration's `lr` and `min_lr`, as far as they are set.

    Args:
        config: the run's configuration.
        factor: what both are multiplied by.
    """
    override = ParamGroupOverride()
    if config.lr is not None:
        override["max_lr"] = config.lr * factor
    if config.min_lr is not None:
        override["min_lr"] = config.min_lr * factor
    return override


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str | None = None
) -> dict[ParamKey, ParamGroupOverride]:
    """Return muP's overrides for a model that is `mup_width_mult` times wider than the one that was tuned.

    The optimizer's entry brings the rule (`OptimizerEntry.mup`). Where it brings none, hidden matrices are stepped with
    `lr / mup_width_mult` and everything else is left alone. Combine the result with
    :func:`get_standard_config_overrides`: embeddings and output heads are not scaled, so `decoupled_lr` stands.

    Args:
        config: the run's configuration.
        mup_width_mult: width divided by the width that was tuned; positive.
        optimizer_type: name of the optimizer; None: `config.optimizer`.

    Returns:
        A new dictionary.

    Raises:
        ConfigurationError: `mup_width_mult` is not positive.

    Source: Yang et al., Tensor Programs V, arXiv:2203.03466, table 8.
    """
    if not mup_width_mult > 0:
        raise ConfigurationError(
            f"mup_width_mult={mup_width_mult!r}: must be positive",
            setting="mup_width_mult",
            value=mup_width_mult,
        )
    rule = get_registry().optimizer(config.optimizer if optimizer_type is None else optimizer_type).mup
    if rule is not None:
        return dict(rule(config, mup_width_mult))
    return {ParamKey(role=Role.MATRIX): scaled_learning_rate(config, 1.0 / mup_width_mult)}
