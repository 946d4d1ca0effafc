"""The optimizers of large-model training for any PyTorch model, every one of them a plugin.

Public names are imported when they are first used: `import megaopt_core` itself imports no plugin and not even torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt_core.build import build_optimizer, get_megatron_optimizer
    from megaopt_core.checkpoint.loading import load_checkpoint
    from megaopt_core.checkpoint.report import LoadReport
    from megaopt_core.checkpoint.saving import save_checkpoint
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.distributed.config import DistributedDataParallelConfig
    from megaopt_core.distributed.data_parallel import DistributedDataParallel
    from megaopt_core.distributed.planning import plan_full_param_layout
    from megaopt_core.entries import OptimizerEntry
    from megaopt_core.errors import MegaoptError
    from megaopt_core.hookspecs import hookimpl
    from megaopt_core.optimizers.base import MegatronOptimizer
    from megaopt_core.optimizers.base_policy import BasePrecisionPolicy
    from megaopt_core.optimizers.chained import ChainedOptimizer
    from megaopt_core.optimizers.grad_scaler import ConstantGradScaler, DynamicGradScaler
    from megaopt_core.optimizers.precision import PrecisionPolicy
    from megaopt_core.optimizers.result import StepResult
    from megaopt_core.optimizers.state_codes import CodedState, StoredSlice
    from megaopt_core.parallel.groups import ProcessGroupCollection
    from megaopt_core.params.keys import ParamKey, ParamPredicate, ParamWithNamePredicate
    from megaopt_core.params.overrides import (
        ParamGroupOverride,
        combine_param_group_overrides,
        param_group_override_to_tuple,
    )
    from megaopt_core.params.roles import Role
    from megaopt_core.params.routing import Routing, route
    from megaopt_core.params.specs import Granularity, ParamSpec
    from megaopt_core.params.standard import (
        get_mup_config_overrides,
        get_standard_config_overrides,
        scaled_learning_rate,
    )
    from megaopt_core.params.views import MatrixView
    from megaopt_core.registry import get_registry
    from megaopt_core.run_file import RunFile
    from megaopt_core.schedules.scheduler import OptimizerParamScheduler
    from megaopt_core.schedules.styles import ScheduleStyle
    from megaopt_core.sharding.base import ShardingStrategy
    from megaopt_core.wrappers import (
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MixedPrecisionOptimizer,
    )

__all__ = [
    "BasePrecisionPolicy",
    "ChainedOptimizer",
    "CodedState",
    "ConstantGradScaler",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "Granularity",
    "LoadReport",
    "MatrixView",
    "MegaoptError",
    "MegatronOptimizer",
    "MixedPrecisionOptimizer",
    "OptimizerConfig",
    "OptimizerEntry",
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "ParamKey",
    "ParamPredicate",
    "ParamSpec",
    "ParamWithNamePredicate",
    "PrecisionPolicy",
    "ProcessGroupCollection",
    "Role",
    "Routing",
    "RunFile",
    "ScheduleStyle",
    "ShardingStrategy",
    "StepResult",
    "StoredSlice",
    "build_optimizer",
    "combine_param_group_overrides",
    "get_megatron_optimizer",
    "get_mup_config_overrides",
    "get_registry",
    "get_standard_config_overrides",
    "hookimpl",
    "load_checkpoint",
    "param_group_override_to_tuple",
    "plan_full_param_layout",
    "route",
    "save_checkpoint",
    "scaled_learning_rate",
]

_HOME = {
    "BasePrecisionPolicy": "optimizers.base_policy",
    "ChainedOptimizer": "optimizers.chained",
    "CodedState": "optimizers.state_codes",
    "ConstantGradScaler": "optimizers.grad_scaler",
    "DistributedDataParallel": "distributed.data_parallel",
    "DistributedDataParallelConfig": "distributed.config",
    "DynamicGradScaler": "optimizers.grad_scaler",
    "FP32Optimizer": "wrappers",
    "Float16OptimizerWithFloat16Params": "wrappers",
    "Granularity": "params.specs",
    "LoadReport": "checkpoint.report",
    "MatrixView": "params.views",
    "MegaoptError": "errors",
    "MegatronOptimizer": "optimizers.base",
    "MixedPrecisionOptimizer": "wrappers",
    "OptimizerConfig": "config",
    "OptimizerEntry": "entries",
    "OptimizerParamScheduler": "schedules.scheduler",
    "ParamGroupOverride": "params.overrides",
    "ParamKey": "params.keys",
    "ParamPredicate": "params.keys",
    "ParamSpec": "params.specs",
    "ParamWithNamePredicate": "params.keys",
    "PrecisionPolicy": "optimizers.precision",
    "ProcessGroupCollection": "parallel.groups",
    "Role": "params.roles",
    "Routing": "params.routing",
    "RunFile": "run_file",
    "ScheduleStyle": "schedules.styles",
    "ShardingStrategy": "sharding.base",
    "StepResult": "optimizers.result",
    "StoredSlice": "optimizers.state_codes",
    "build_optimizer": "build",
    "combine_param_group_overrides": "params.overrides",
    "get_megatron_optimizer": "build",
    "get_mup_config_overrides": "params.standard",
    "get_registry": "registry",
    "get_standard_config_overrides": "params.standard",
    "hookimpl": "hookspecs",
    "load_checkpoint": "checkpoint.loading",
    "param_group_override_to_tuple": "params.overrides",
    "plan_full_param_layout": "distributed.planning",
    "route": "params.routing",
    "save_checkpoint": "checkpoint.saving",
    "scaled_learning_rate": "params.standard",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        from megaopt_core.catalogue import deprecated_alias

        new_name = deprecated_alias(name)
        if new_name is not None:
            return globals().get(new_name) or __getattr__(new_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
