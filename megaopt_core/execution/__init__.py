"""The inner step: building the inner optimizer, its state before the first step, how the step is run."""

from megaopt_core.execution._exchanged_step import ExchangedStep
from megaopt_core.execution._inner import build_inner
from megaopt_core.execution._inner_part import InnerPart
from megaopt_core.execution._placeholders import StatePlaceholder, is_placeholder
from megaopt_core.execution._step_runner import StepRunner
from megaopt_core.precision._batches import in_turns

__all__ = [
    "ExchangedStep",
    "InnerPart",
    "StatePlaceholder",
    "StepRunner",
    "build_inner",
    "in_turns",
    "is_placeholder",
]
