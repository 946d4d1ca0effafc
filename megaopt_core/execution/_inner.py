"""Building the inner torch optimizer of one child, and running it on what a precision policy lends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from megaopt_core.config._constructor import constructor_kwargs
from megaopt_core.errors import PluginError
from megaopt_core.execution._placeholders import placeholders_hidden
from megaopt_core.plugin_api._entries import OptimizerEntry

if TYPE_CHECKING:
    from megaopt_core.config._optimizer_config import OptimizerConfig
    from megaopt_core.parallel._groups import ProcessGroupCollection
    from megaopt_core.precision._policy import PrecisionPolicy

__all__ = ["build_inner", "global_hooks_suspended", "run_inner"]


@contextmanager
def global_hooks_suspended() -> Iterator[None]:
    """Keep the hooks of `register_optimizer_step_pre_hook` and `..._post_hook` from firing inside the block.

    They fire once for the optimizer that a user steps, not again for those inside it. Hooks that were registered on an
    inner optimizer itself fire as ever.
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


def run_inner(
    precision: PrecisionPolicy,
    inner: torch.optim.Optimizer,
    action: Callable[[], Any],
    *,
    store_all: bool = False,
) -> None:
    """Call something on the inner optimizer while its tensors have their memory: once for each batch of them.

    Args:
        precision: lends the memory.
        inner: the inner optimizer.
        action: what to call: its `step`, its `eval`, or what makes its state.
        store_all: values may change without a gradient.
    """
    with (
        global_hooks_suspended(),
        placeholders_hidden(inner),
        closing(precision.batches(inner, store_all=store_all)) as batches,
    ):
        for _ in batches:
            action()


def build_inner(
    entry: OptimizerEntry,
    groups: Sequence[dict[str, Any]],
    config: OptimizerConfig,
    chunks: Sequence[torch.nn.Module],
    pgs: ProcessGroupCollection,
    settings: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return the inner optimizer; its state is made afterwards.

    Args:
        entry: the optimizer's entry.
        groups: inner groups: `params` and the group's settings.
        config: the run's configuration.
        chunks: the model chunks.
        pgs: the process groups.
        settings: constructor settings that differ from the configuration's.

    Raises:
        PluginError: the class refuses its arguments.
    """
    optimizer_cls = entry.load_class()
    kwargs = constructor_kwargs(entry, config, chunks, pgs, settings)
    try:
        inner = optimizer_cls([dict(group) for group in groups], **kwargs)
    except TypeError as error:
        raise PluginError(f"{optimizer_cls.__name__} does not take {sorted(kwargs)}: {error}") from error
    _require_groups(inner, groups)
    return inner


def _require_groups(inner: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Raise unless an optimizer holds the groups that it was made of, with the parameters that they had."""
    name = type(inner).__name__
    given = [sorted(map(id, group["params"])) for group in groups]
    try:
        held = [sorted(map(id, group["params"])) for group in inner.param_groups]
    except (AttributeError, KeyError, TypeError) as error:
        raise PluginError(
            f"{name} has no param_groups with params; every torch.optim.Optimizer has them"
        ) from error
    if held != given:
        counts = f"{sum(map(len, held))} parameters in {len(held)} groups"
        raise PluginError(
            f"{name} holds {counts}, but was given {sum(map(len, given))} in {len(given)}: its constructor "
            "must pass params to torch.optim.Optimizer unchanged"
        )
    if not isinstance(inner.defaults, dict):
        raise PluginError(f"{name}.defaults is not a dictionary; that of a torch.optim.Optimizer is")
