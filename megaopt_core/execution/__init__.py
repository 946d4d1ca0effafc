"""The inner step: building the inner optimizer, its state before the first step."""

from typing import TYPE_CHECKING

from megaopt_core import resolve_lazily

if TYPE_CHECKING:
    from megaopt_core.execution._inner import build_inner
else:
    __getattr__, __dir__ = resolve_lazily(__name__, {"build_inner": "_inner"})

__all__ = ["build_inner"]
