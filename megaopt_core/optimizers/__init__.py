"""What steps: the pipeline, its parts, `MegatronOptimizer`, the chain, and the public wrappers."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.optimizers._base import MegatronOptimizer
    from megaopt_core.optimizers._chained import ChainedOptimizer
    from megaopt_core.optimizers._gradients.grad_scaler import (
        ConstantGradScaler,
        DynamicGradScaler,
        MegatronGradScaler,
    )
    from megaopt_core.optimizers._part import OptimizerPart
    from megaopt_core.optimizers._result import StepResult
    from megaopt_core.optimizers._wrappers import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MixedPrecisionOptimizer,
    )
else:
    __getattr__, __dir__ = resolve_lazily(
        __name__,
        {
            "OptimizerPart": "_part",
            "ChainedOptimizer": "_chained",
            "ConstantGradScaler": "_gradients.grad_scaler",
            "DynamicGradScaler": "_gradients.grad_scaler",
            "FP32Optimizer": "_wrappers",
            "Float16OptimizerWithFloat16Params": "_wrappers",
            "MegatronGradScaler": "_gradients.grad_scaler",
            "MegatronOptimizer": "_base",
            "MixedPrecisionOptimizer": "_wrappers",
            "StepResult": "_result",
        },
    )

__all__ = [
    "ChainedOptimizer",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "MegatronGradScaler",
    "MegatronOptimizer",
    "MixedPrecisionOptimizer",
    "OptimizerPart",
    "StepResult",
]
