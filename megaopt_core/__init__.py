"""The optimizers of large-model training for any PyTorch model, every one of them a plugin.

Public names are imported when they are first used: `import megaopt_core` itself imports no plugin and not even torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt_core.build import build_optimizer, get_megatron_optimizer
    from megaopt_core.config import OptimizerConfig
    from megaopt_core.errors import MegaoptError
    from megaopt_core.optimizers import (
        ChainedOptimizer,
        ConstantGradScaler,
        DynamicGradScaler,
        Float16OptimizerWithFloat16Params,
        FP32Optimizer,
        MegatronOptimizer,
        MixedPrecisionOptimizer,
        StepResult,
    )
    from megaopt_core.parallel import ProcessGroupCollection
    from megaopt_core.params import (
        Granularity,
        MatrixView,
        ParamGroupOverride,
        ParamKey,
        ParamPredicate,
        ParamSpec,
        ParamWithNamePredicate,
        Role,
        combine_param_group_overrides,
        param_group_override_to_tuple,
    )
    from megaopt_core.params._views import Fused
    from megaopt_core.plugin_api import OptimizerEntry, ScheduleStyle, hookimpl
    from megaopt_core.precision import CodedState, PrecisionPolicy, StoredSlice
    from megaopt_core.registry import get_registry
    from megaopt_core.routing import (
        Routing,
        get_mup_config_overrides,
        get_standard_config_overrides,
        route,
        scaled_learning_rate,
    )
    from megaopt_core.schedules import OptimizerParamScheduler, get_canonical_lr_for_logging
    from megaopt_core.sharding import ShardingStrategy

__all__ = [
    "ChainedOptimizer",
    "CodedState",
    "ConstantGradScaler",
    "DynamicGradScaler",
    "FP32Optimizer",
    "Float16OptimizerWithFloat16Params",
    "Fused",
    "Granularity",
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
    "ScheduleStyle",
    "ShardingStrategy",
    "StepResult",
    "StoredSlice",
    "build_optimizer",
    "combine_param_group_overrides",
    "get_canonical_lr_for_logging",
    "get_megatron_optimizer",
    "get_mup_config_overrides",
    "get_registry",
    "get_standard_config_overrides",
    "hookimpl",
    "param_group_override_to_tuple",
    "route",
    "scaled_learning_rate",
]

_HOME = {
    "ChainedOptimizer": "optimizers",
    "CodedState": "precision",
    "ConstantGradScaler": "optimizers",
    "DynamicGradScaler": "optimizers",
    "FP32Optimizer": "optimizers",
    "Float16OptimizerWithFloat16Params": "optimizers",
    "Fused": "params._views",
    "Granularity": "params",
    "MatrixView": "params",
    "MegaoptError": "errors",
    "MegatronOptimizer": "optimizers",
    "MixedPrecisionOptimizer": "optimizers",
    "OptimizerConfig": "config",
    "OptimizerEntry": "plugin_api",
    "OptimizerParamScheduler": "schedules",
    "ParamGroupOverride": "params",
    "ParamKey": "params",
    "ParamPredicate": "params",
    "ParamSpec": "params",
    "ParamWithNamePredicate": "params",
    "PrecisionPolicy": "precision",
    "ProcessGroupCollection": "parallel",
    "Role": "params",
    "Routing": "routing",
    "ScheduleStyle": "plugin_api",
    "ShardingStrategy": "sharding",
    "StepResult": "optimizers",
    "StoredSlice": "precision",
    "build_optimizer": "build",
    "combine_param_group_overrides": "params",
    "get_canonical_lr_for_logging": "schedules",
    "get_megatron_optimizer": "build",
    "get_mup_config_overrides": "routing",
    "get_registry": "registry",
    "get_standard_config_overrides": "routing",
    "hookimpl": "plugin_api",
    "param_group_override_to_tuple": "params",
    "route": "routing",
    "scaled_learning_rate": "routing",
}


def resolve_lazily(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`: its public names are imported when they are first used.

    Args:
        package: its `__name__`.
        homes: public name to the module in it that defines the name.
    """
    names = vars(importlib.import_module(package))

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        names[name] = value
        return value

    return resolve, lambda: sorted({*names, *homes})


_resolve, _names = resolve_lazily(__name__, _HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME or name.startswith("_"):
        return _resolve(name)
    catalogue = importlib.import_module(f"{__name__}.registry._catalogue")
    catalogue.require_here(name)
    return _resolve(catalogue.deprecated_alias(name) or name)


def __dir__() -> list[str]:
    return _names()
