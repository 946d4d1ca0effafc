"""The stages of a step under their standard names: timers and profiler ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from megaopt_core.errors import naming_user_function

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig

__all__ = ["STAGES", "stage"]

STAGES = {
    "optimizer-copy-to-main-grad": "gradients are collected and cast",
    "optimizer-unscale-and-check-inf": "gradients are unscaled and checked",
    "optimizer-count-zeros": "zeros are counted on this rank",
    "optimizer-clip-main-grad": "norm and clipping; statistics of all ranks meet here",
    "optimizer-inner-step": "the inner optimizer steps",
    "optimizer-copy-main-to-model-params": "main parameters are rounded into the model's",
    "params-all-gather": "updated parameters are brought to every rank",
}
"""Stage name to what happens in it, in the order of a step; `config.timers` is asked for timers of these names."""


def stage(config: OptimizerConfig, name: str) -> AbstractContextManager[None]:
    """Return a context that times a stage with `config.timers`, if there are any, and marks it for the profiler.

    Args:
        config: gives `timers` (called with name and log level 1) and `barrier_with_L1_time`.
        name: a key of `STAGES`.
    """
    if config.timers is None and not _profiler_enabled():
        return nullcontext()
    return _observed(config, name)


@contextmanager
def _observed(config: OptimizerConfig, name: str) -> Iterator[None]:
    timer = None
    if config.timers is not None:
        with naming_user_function("timers", f"({name!r}, log_level=1)"):
            timer = config.timers(name, log_level=1)
    if timer is not None:
        timer.start(barrier=config.barrier_with_L1_time)
    try:
        with record_function(f"megaopt::{name}"):
            yield
    finally:
        if timer is not None:
            timer.stop()
