"""Checkpoints of models and optimizers as files, as a megaopt plugin."""

import importlib
from typing import TYPE_CHECKING, Any

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

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
