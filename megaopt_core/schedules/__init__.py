"""Learning rate and weight decay over the steps: the scheduler and the built-in styles."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.schedules._logging import get_canonical_lr_for_logging
    from megaopt_core.schedules._scheduler import OptimizerParamScheduler
    from megaopt_core.schedules._styles import BUILTIN_STYLES
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "BUILTIN_STYLES": "_styles",
            "OptimizerParamScheduler": "_scheduler",
            "get_canonical_lr_for_logging": "_logging",
        },
    )

__all__ = ["BUILTIN_STYLES", "OptimizerParamScheduler", "get_canonical_lr_for_logging"]
