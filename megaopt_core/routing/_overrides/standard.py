"""The overrides that follow from the configuration alone: weight decay, decoupled learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megaopt_core.config._optimizer_config import require_config
from megaopt_core.params._keys import ParamKey, ParamPredicate, ParamWithNamePredicate
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._roles import Role

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig

__all__ = ["STANDARD_KEYS", "get_standard_config_overrides"]

_EMBEDDING_OR_OUTPUT = ParamKey(attr="is_embedding_or_output_parameter", role=(Role.EMBEDDING, Role.OUTPUT))


def _no_decay(param: torch.nn.Parameter) -> bool:
    return param.dim() < 2


def _no_decay_outside_qk_layernorm(param: torch.nn.Parameter, name: str) -> bool:
    vector = param.dim() < 2 or name.endswith(".bias")
    return vector and "q_layernorm." not in name and "k_layernorm." not in name


_VECTOR = ParamKey(name="*.bias", predicate=ParamPredicate(name="fewer_than_2_dimensions", fn=_no_decay))
_VECTOR_OUTSIDE_QK_LAYERNORM = ParamKey(
    with_name_predicate=ParamWithNamePredicate(
        name="vector_or_bias_outside_qk_layernorm", fn=_no_decay_outside_qk_layernorm
    )
)

STANDARD_KEYS = frozenset([_EMBEDDING_OR_OUTPUT, _VECTOR, _VECTOR_OUTSIDE_QK_LAYERNORM])
"""Keys that need not match anything, whoever hands them over: a model without biases is no mistake."""


def get_standard_config_overrides(config: OptimizerConfig) -> dict[ParamKey, ParamGroupOverride]:
    """Return the overrides that apply when `config_overrides` is None.

    No weight decay on biases and on parameters with fewer than two dimensions (with
    `apply_wd_to_qk_layernorm`, query and key layer norms do decay); `decoupled_lr` for embeddings and output heads.

    Args:
        config: the run's configuration.

    Returns:
        A new dictionary that the caller may extend.
    """
    require_config(config)
    no_decay = _VECTOR_OUTSIDE_QK_LAYERNORM if config.apply_wd_to_qk_layernorm else _VECTOR
    overrides = {no_decay: ParamGroupOverride(wd_mult=0.0)}
    if config.decoupled_lr is not None:
        decoupled = ParamGroupOverride(max_lr=config.decoupled_lr)
        if config.decoupled_min_lr is not None:
            decoupled["min_lr"] = config.decoupled_min_lr
        overrides[_EMBEDDING_OR_OUTPUT] = decoupled
    return overrides
