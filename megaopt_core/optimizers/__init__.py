"""What steps: the pipeline, its parts, `MegatronOptimizer`, the chain, and the public wrappers."""

from megaopt_core.optimizers._base import MegatronOptimizer
from megaopt_core.optimizers._building.model_alike import kind_of, model_alike, modules_of_experts
from megaopt_core.optimizers._chained import ChainedOptimizer
from megaopt_core.optimizers._gradients.grad_scaler import (
    ConstantGradScaler,
    DynamicGradScaler,
    MegatronGradScaler,
)
from megaopt_core.optimizers._gradients.statistics import is_read_freely
from megaopt_core.optimizers._part import OptimizerPart
from megaopt_core.optimizers._result import StepResult
from megaopt_core.optimizers._wrappers import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MixedPrecisionOptimizer,
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
    "is_read_freely",
    "kind_of",
    "model_alike",
    "modules_of_experts",
]
