"""The inner step: building the inner optimizer, its state before the first step."""

from megaopt_core.execution._inner import build_inner

__all__ = ["build_inner"]
