"""Whole matrices stepped by their owners, as a megaopt plugin."""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

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
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
