"""The plugin: the sharding strategy `layer_wise`."""

from __future__ import annotations

__all__ = ["megaopt_api"]

megaopt_api = "1"
