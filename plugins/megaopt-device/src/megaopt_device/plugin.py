"""The plugin: what runs the steps of optimizers otherwise than in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megaopt_core import Granularity, hookimpl
from megaopt_device.graphs import CapturedStep
from megaopt_device.placement import StateOnCpu, StepOnCpu

if TYPE_CHECKING:
    from megaopt_core import OptimizerConfig, OptimizerEntry
    from megaopt_core.execution import StepRunner

__all__ = ["megaopt_api", "megaopt_step_runner"]

megaopt_api = "1"


@hookimpl
def megaopt_step_runner(config: OptimizerConfig, entry: OptimizerEntry, name: str) -> StepRunner | None:
    """Return what captures an optimizer's step, or keeps its states on the CPU.

    Args:
        config: the run's configuration.
        entry: the optimizer's entry.
        name: its registered name.
    """
    if config.optimizer_cuda_graph:
        return CapturedStep(name)
    if not config.optimizer_cpu_offload:
        return None
    whole = entry.configured(config).granularity is Granularity.TENSOR
    return StateOnCpu(config, entry, name) if whole else StepOnCpu(config, entry, name)
