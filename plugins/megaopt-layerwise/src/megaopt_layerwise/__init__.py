"""Whole matrices stepped by their owners, as a megaopt plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt_layerwise.buffer_routing import (
        is_managed_by_layer_wise_optimizer,
        tag_params_for_buffer_routing,
    )
    from megaopt_layerwise.optimizer import LayerWiseDistributedOptimizer

__all__ = [
    "LayerWiseDistributedOptimizer",
    "is_managed_by_layer_wise_optimizer",
    "tag_params_for_buffer_routing",
]

_HOME = {
    "LayerWiseDistributedOptimizer": "optimizer",
    "is_managed_by_layer_wise_optimizer": "buffer_routing",
    "tag_params_for_buffer_routing": "buffer_routing",
}


if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
