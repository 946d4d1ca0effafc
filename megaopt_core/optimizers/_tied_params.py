"""Parameter objects that share their memory: stepped once, with the sum of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping

import torch
from attrs import field, frozen
from torch.autograd import Variable

__all__ = ["Twins"]


@frozen(eq=False)
class Twins:
    """Parameters with the other objects of the same memory, to each of which autograd gives a gradient of its own.

    Twins are in no group. Who goes through the groups between backward and step, as `torch.amp.GradScaler` does to
    unscale and check gradients, would miss theirs: they are added when a backward pass is over.

    Args:
        of: the parameter that is stepped, to its twins.
    """

    of: Mapping[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        hooked = [twin for twin in self if twin.requires_grad and twin.is_leaf]
        hook = _after_backward(weakref.ref(self))
        handles = [twin.register_post_accumulate_grad_hook(hook) for twin in hooked]
        if handles:
            weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def __iter__(self) -> Iterator[torch.nn.Parameter]:
        return (twin for twins in self.of.values() for twin in twins)

    @torch.no_grad()
    def fold_grads(self) -> None:
        """Add every twin's gradient to that of the parameter that is stepped, and clear it."""
        for param, twins in self.of.items():
            for twin in twins:
                if twin.grad is not None:
                    param.grad = twin.grad if param.grad is None else param.grad + twin.grad
                    twin.grad = None


def _after_backward(reference: weakref.ref[Twins]) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds gradients up after the backward pass that calls it; it keeps nothing alive."""
    queue = Variable._execution_engine.queue_callback

    def fold() -> None:
        twins = reference()
        if twins is not None:
            twins.fold_grads()

    # A callback that another one queues runs after all that wrappers queued during the pass: torch's DDP brings reduced
    # gradients back in one of those.
    return lambda _: queue(lambda: queue(fold))
