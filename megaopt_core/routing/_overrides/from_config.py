"""Overrides that follow from the configuration: weight decay, decoupled learning rate, and muP's for a wider model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import field, frozen

from megaopt_core.config._optimizer_config import OptimizerConfig, require_config
from megaopt_core.errors import ConfigurationError
from megaopt_core.params._keys import ParamKey, ParamPredicate, ParamWithNamePredicate, as_tuple
from megaopt_core.params._overrides import ParamGroupOverride
from megaopt_core.params._roles import Role
from megaopt_core.registry._registry import get_registry

__all__ = [
    "STANDARD_KEYS",
    "get_mup_config_overrides",
    "get_standard_config_overrides",
    "matrix_like_overrides",
    "scaled_learning_rate",
    "vector_like_overrides",
]

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


def is_vector_like(param: torch.nn.Parameter, role: Role) -> bool:
    """Return whether at most one side of a parameter grows with the width: embeddings, and fewer dimensions than 2.

    Args:
        param: the parameter; an attribute `shared_embedding` alone makes it one.
        role: what it was found to be.
    """
    return param.dim() < 2 or role is Role.EMBEDDING or bool(getattr(param, "shared_embedding", False))


def is_matrix_like(param: torch.nn.Parameter, role: Role) -> bool:
    """Return whether a parameter is none of those, output heads included.

    Args:
        param: the parameter.
        role: what it was found to be.
    """
    return not is_vector_like(param, role)


@frozen
class _WidthKey(ParamKey):
    """Matches parameters of these roles whose shape grows with the width in one way."""

    grows: Callable[[torch.nn.Parameter, Role], bool] = field(default=is_matrix_like, kw_only=True)

    def matched_by(self, param: torch.nn.Parameter, param_name: str, role: Role | None = None) -> str | None:
        if role is None or role not in as_tuple(self.role) or not self.grows(param, role):
            return None
        return f"{self.grows.__name__.removeprefix('is_').replace('_', '-')} {role.value}"

    def __str__(self) -> str:
        return f"{self.grows.__name__} {super().__str__()}"


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


def matrix_like_overrides(
    config: OptimizerConfig, override: ParamGroupOverride, *, but: tuple[Role, ...] = ()
) -> dict[ParamKey, ParamGroupOverride]:
    """Return an override of all matrix-like parameters: what is neither an embedding nor of fewer dimensions than 2.

    Where `decoupled_lr` is set, its learning rate wins for output heads; the override's other keys hold for them too.

    Args:
        config: the run's configuration.
        override: what they get.
        but: roles that are left alone.
    """
    return _of_roles(config, override, is_matrix_like, but)


def vector_like_overrides(
    config: OptimizerConfig, override: ParamGroupOverride
) -> dict[ParamKey, ParamGroupOverride]:
    """Return an override of all vector-like parameters: embeddings, and what has fewer than 2 dimensions.

    Where `decoupled_lr` is set, its learning rate wins for embeddings and output heads.

    Args:
        config: the run's configuration.
        override: what they get.
    """
    return _of_roles(config, override, is_vector_like, ())


def _of_roles(
    config: OptimizerConfig,
    override: ParamGroupOverride,
    grows: Callable[[torch.nn.Parameter, Role], bool],
    but: tuple[Role, ...],
) -> dict[ParamKey, ParamGroupOverride]:
    roles = [role for role in Role if role not in but]
    decoupled = tuple(
        role for role in roles if role.is_embedding_or_output and config.decoupled_lr is not None
    )
    rest = {key: value for key, value in override.items() if key not in ("max_lr", "min_lr")}
    found: dict[ParamKey, ParamGroupOverride] = {}
    if override:
        plain = tuple(role for role in roles if role not in decoupled)
        found[_WidthKey(role=plain, grows=grows)] = override
    if rest and decoupled:
        found[_WidthKey(role=decoupled, grows=grows)] = rest  # type: ignore[assignment]
    return found


def get_mup_config_overrides(
    config: OptimizerConfig, mup_width_mult: float, optimizer_type: str | None = None
) -> dict[ParamKey, ParamGroupOverride]:
    """Return muP's overrides for a model that is `mup_width_mult` times wider than the one that was tuned.

    The optimizer's entry brings the rule (`OptimizerEntry.mup`). Where it brings none, matrix-like parameters, output
    heads included, get `lr / mup_width_mult` and everything else is left alone. Combine the result with
    :func:`get_standard_config_overrides`: the learning rate of `decoupled_lr` wins for embeddings and output heads. A
    model that divides its logits by the width instead sets `decoupled_lr=lr`, which leaves its head's as it was.

    Args:
        config: the run's configuration.
        mup_width_mult: width divided by the width that was tuned; positive. 1 gives no overrides.
        optimizer_type: name of the optimizer; None: `config.optimizer`.

    Returns:
        A new dictionary.

    Raises:
        ConfigurationError: `mup_width_mult` is no positive number.

    Source: Yang et al., Tensor Programs V, arXiv:2203.03466, table 3.
    """
    require_config(config)
    number = isinstance(mup_width_mult, (int, float)) and not isinstance(mup_width_mult, bool)
    if not (number and 0 < mup_width_mult < float("inf")):
        raise ConfigurationError.of("mup_width_mult", mup_width_mult, "must be positive")
    rule = get_registry().optimizer(config.optimizer if optimizer_type is None else optimizer_type).mup
    if mup_width_mult == 1:
        return {}
    if rule is not None:
        return dict(rule(config, mup_width_mult))
    return matrix_like_overrides(config, scaled_learning_rate(config, 1.0 / mup_width_mult))
