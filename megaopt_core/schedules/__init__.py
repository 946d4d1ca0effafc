"""Learning rate and weight decay over the steps: the scheduler and the built-in styles."""

from megaopt_core.schedules._logging import get_canonical_lr_for_logging
from megaopt_core.schedules._scheduler import HasParamGroups, OptimizerParamScheduler
from megaopt_core.schedules._styles import BUILTIN_STYLES

__all__ = ["BUILTIN_STYLES", "HasParamGroups", "OptimizerParamScheduler", "get_canonical_lr_for_logging"]
