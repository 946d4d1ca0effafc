"""Any optimizer on FSDP2: whole tensors are transformed by their owners, as a megaopt plugin."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaopt_fsdp.before_sharding import build_before_sharding
    from megaopt_fsdp.from_params import build_from_params

__all__ = ["build_before_sharding", "build_from_params"]

_HOMES = {"build_before_sharding": "before_sharding", "build_from_params": "from_params"}


if not TYPE_CHECKING:  # listing plugins imports this package, and needs none of what it holds

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
