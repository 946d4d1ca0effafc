"""Learning rate and weight decay over the steps: the scheduler and the built-in styles."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.schedules._scheduler import OptimizerParamScheduler
    from megaopt_core.schedules._styles import BUILTIN_STYLES
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__, {"BUILTIN_STYLES": "_styles", "OptimizerParamScheduler": "_scheduler"}
    )

__all__ = ["BUILTIN_STYLES", "OptimizerParamScheduler"]
