"""What muP asks of Adam and of SGD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core import scaled_learning_rate
from megaopt_core.routing import matrix_like_overrides, vector_like_overrides

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, ParamGroupOverride, ParamKey

__all__ = ["adam_mup", "sgd_mup"]


def adam_mup(config: OptimizerConfig, mup_width_mult: float) -> dict[ParamKey, ParamGroupOverride]:
    """Return `lr/m`, `min_lr/m` and `eps/m` for matrix-like parameters, output heads included.

    Args:
        config: the run's configuration.
        mup_width_mult: `m`, the width divided by the width that was tuned.
    """
    override = scaled_learning_rate(config, 1.0 / mup_width_mult)
    override["eps"] = config.adam_eps / mup_width_mult  # type: ignore[typeddict-unknown-key]
    return matrix_like_overrides(config, override)


def sgd_mup(config: OptimizerConfig, mup_width_mult: float) -> dict[ParamKey, ParamGroupOverride]:
    """Return `lr*m` and `min_lr*m` for vector-like parameters, embeddings included; matrices stay.

    Args:
        config: the run's configuration.
        mup_width_mult: `m`, the width divided by the width that was tuned.
    """
    return vector_like_overrides(config, scaled_learning_rate(config, mup_width_mult))
