"""Checkpoints of models and optimizers as files, as a megaopt plugin."""

from typing import TYPE_CHECKING

from megaopt_core.plugin_api import resolve_lazily

if TYPE_CHECKING:
    from megaopt_checkpoint.convert import convert_checkpoint
    from megaopt_checkpoint.foreign import load_torch_state_dict
    from megaopt_checkpoint.load_report import LoadReport
    from megaopt_checkpoint.loading import load_checkpoint
    from megaopt_checkpoint.saving import save_checkpoint
    from megaopt_checkpoint.verify import verify_checkpoint

__all__ = [
    "LoadReport",
    "convert_checkpoint",
    "load_checkpoint",
    "load_torch_state_dict",
    "save_checkpoint",
    "verify_checkpoint",
]

_HOME = {
    "LoadReport": "load_report",
    "convert_checkpoint": "convert",
    "load_checkpoint": "loading",
    "load_torch_state_dict": "foreign",
    "save_checkpoint": "saving",
    "verify_checkpoint": "verify",
}

if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds
    __getattr__, __dir__ = resolve_lazily(__name__, _HOME)
