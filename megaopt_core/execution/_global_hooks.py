"""Torch's global step hooks fire once for the optimizer that a user steps, not again for those inside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import optimizer as torch_optimizer

__all__ = ["global_hooks_suspended"]


@contextmanager
def global_hooks_suspended() -> Iterator[None]:
    """Keep the hooks of `register_optimizer_step_pre_hook` and `..._post_hook` from firing inside the block.

    Hooks that were registered on an inner optimizer itself fire as ever.
    """
    registered: tuple[dict[int, Any], ...] = (
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    )
    kept = [dict(hooks) for hooks in registered]
    for hooks in registered:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(registered, kept, strict=True):
            hooks.update(before)
