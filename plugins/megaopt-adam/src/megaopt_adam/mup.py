"""What muP asks of Adam and of SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core import ParamGroupOverride, ParamKey, ParamPredicate, Role, scaled_learning_rate

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig

__all__ = ["adam_mup", "sgd_mup"]


def adam_mup(config: OptimizerConfig, mup_width_mult: float) -> dict[ParamKey, ParamGroupOverride]:
    """Return `lr/m`, `min_lr/m` and `eps/m` for hidden matrices; vectors, embeddings and heads stay.

    Args:
        config: the run's configuration.
        mup_width_mult: `m`, the width divided by the width that was tuned.
    """
    override = scaled_learning_rate(config, 1.0 / mup_width_mult)
    override["eps"] = config.adam_eps / mup_width_mult  # type: ignore[typeddict-unknown-key]
    return {ParamKey(role=Role.MATRIX): override}


def _is_vector(param: object) -> bool:
    return getattr(param, "ndim", 0) < 2


def sgd_mup(config: OptimizerConfig, mup_width_mult: float) -> dict[ParamKey, ParamGroupOverride]:
    """Return `lr*m` and `min_lr*m` for parameters with fewer than two dimensions; matrices stay.

    Args:
        config: the run's configuration.
        mup_width_mult: `m`, the width divided by the width that was tuned.
    """
    key = ParamKey(predicate=ParamPredicate(name="fewer_than_2_dimensions", fn=_is_vector))
    return {key: scaled_learning_rate(config, mup_width_mult)}
