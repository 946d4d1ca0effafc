"""State that stands in for what an optimizer will make in its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from operator import is_
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["StatePlaceholder", "hidden_in", "is_placeholder", "placeholders_hidden", "put_placeholders"]


class StatePlaceholder(dict[str, Any]):
    """One parameter's state before its first step: keys, shapes and dtypes as they will be, every tensor zero.

    It is there to be loaded into. The optimizer never sees it: its first step makes its state as it would by itself,
    unless something was written here until then.

    Args:
        like: state of the same keys, shapes and dtypes.

    Example:
        >>> state = StatePlaceholder({"exp_avg": torch.ones(2)})
        >>> state["exp_avg"].tolist(), state.is_untouched
        ([0.0, 0.0], True)
        >>> _ = state["exp_avg"].fill_(1.0)
        >>> state.is_untouched
        False
    """

    def __init__(self, like: Mapping[str, Any]) -> None:
        super().__init__()
        leaves, self._structure = tree_flatten(dict(like))
        self._makers = list(map(_maker, leaves))
        self.fill()

    def fill(self) -> None:
        """Make every value anew."""
        self._made = [make() for make in self._makers]
        self._versions = list(map(_version, self._made))
        self.clear()
        self.update(tree_unflatten(self._made, self._structure))

    @property
    def is_untouched(self) -> bool:
        """True while every value is the one that was made, and no tensor was written to."""
        now, structure = tree_flatten(dict(self))
        return (
            structure == self._structure
            and all(map(is_, now, self._made))
            and list(map(_version, now)) == self._versions
        )


def is_placeholder(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state only stands in for what its first step will make.

    Args:
        state: the inner optimizer's state of one parameter.
    """
    return isinstance(state, StatePlaceholder) and state.is_untouched


def put_placeholders(inner: torch.optim.Optimizer) -> None:
    """Put a placeholder where an optimizer has state now, and none yet.

    Args:
        inner: the optimizer.
    """
    for param in [key for key in inner.state if isinstance(key, torch.Tensor)]:
        made = inner.state.pop(param)
        if isinstance(made, StatePlaceholder):
            inner.state[param] = made
        elif made:
            inner.state[param] = StatePlaceholder(made)


def placeholders_hidden(inner: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Keep placeholders away from what an optimizer does inside the block; those written to become its state.

    Their memory is given back meanwhile. Parameters that have no state afterwards get theirs again.

    Args:
        inner: the optimizer; its groups say of which parameters.
    """
    return hidden_in(inner.state, (param for group in inner.param_groups for param in group["params"]))


@contextmanager
def hidden_in[Key](states: MutableMapping[Key, Any], keys: Iterable[Key]) -> Iterator[None]:
    """Keep the placeholders of a mapping away from what is done to it inside the block.

    Args:
        states: key to state.
        keys: whose state.
    """
    if StatePlaceholder not in set(map(type, states.values())):
        yield
        return
    hidden: dict[Key, StatePlaceholder] = {}
    for key in keys:
        state = states.get(key)
        if not isinstance(state, StatePlaceholder):
            continue
        if state.is_untouched:
            hidden[key] = states.pop(key)
            state.clear()
        else:
            states[key] = dict(state)
    try:
        yield
    finally:
        for key, state in hidden.items():
            if not states.get(key):
                state.fill()
                states[key] = state


def _maker(value: Any) -> Callable[[], Any]:
    if isinstance(value, torch.Tensor):
        like, device = torch.empty_like(value, device="meta"), value.device
        return lambda: torch.zeros_like(like, device=device)
    if type(value) in (bool, int, float):
        return type(value)
    return lambda: value


def _version(value: Any) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
