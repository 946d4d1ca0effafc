"""Data parallelism and the distributed optimizer (ZeRO-1) as a megaopt plugin."""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_distributed.ddp.config import DistributedDataParallelConfig
    from megaopt_distributed.ddp.data_parallel import DistributedDataParallel
    from megaopt_distributed.ddp.planning import plan_full_param_layout
    from megaopt_distributed.layout import LayoutInBuffers
    from megaopt_distributed.memory import FlatMemory, memory_of
    from megaopt_distributed.params import DistributedParams
    from megaopt_distributed.wrapped import checked_buffers

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedParams",
    "FlatMemory",
    "LayoutInBuffers",
    "checked_buffers",
    "memory_of",
    "plan_full_param_layout",
]

_HOME = {
    "DistributedDataParallel": "ddp.data_parallel",
    "DistributedDataParallelConfig": "ddp.config",
    "DistributedParams": "params",
    "FlatMemory": "memory",
    "LayoutInBuffers": "layout",
    "checked_buffers": "wrapped",
    "memory_of": "memory",
    "plan_full_param_layout": "ddp.planning",
}

if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
