"""Parameter objects that share their memory: stepped once, with the sum of their gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from attrs import field, frozen

__all__ = ["Twins"]


@frozen(eq=False)
class Twins:
    """Parameters with the other objects of the same memory, to each of which autograd gives a gradient of its own.

    Args:
        of: the parameter that is stepped, to its twins.
    """

    of: Mapping[torch.nn.Parameter, tuple[torch.nn.Parameter, ...]] = field(factory=dict)

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
