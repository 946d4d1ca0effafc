"""Data parallelism and the distributed optimizer (ZeRO-1) as a megaopt plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt_distributed.ddp.config import DistributedDataParallelConfig
    from megaopt_distributed.ddp.data_parallel import DistributedDataParallel
    from megaopt_distributed.ddp.planning import plan_full_param_layout
    from megaopt_distributed.layout import LayoutInBuffers
    from megaopt_distributed.memory import FlatMemory, memory_of
    from megaopt_distributed.params import DistributedParams

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedParams",
    "FlatMemory",
    "LayoutInBuffers",
    "memory_of",
    "plan_full_param_layout",
]

_HOME = {
    "DistributedDataParallel": "ddp.data_parallel",
    "DistributedDataParallelConfig": "ddp.config",
    "DistributedParams": "params",
    "FlatMemory": "memory",
    "LayoutInBuffers": "layout",
    "memory_of": "memory",
    "plan_full_param_layout": "ddp.planning",
}


if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
