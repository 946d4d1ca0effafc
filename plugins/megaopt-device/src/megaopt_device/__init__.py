"""What optimizers do with a device: their states in CPU memory, steps as CUDA graphs; a megaopt plugin."""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_device.placement.between_phases import OffloadedPart

__all__ = ["OffloadedPart"]

_HOME = {"OffloadedPart": "placement.between_phases"}

if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
