"""One operator of a forward, and what is known of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

from megaopt_roles.watch._notes import Notes
from megaopt_roles.watch._values import Value

__all__ = ["Op"]


@frozen(eq=False)
class Op:
    """One operator of a forward.

    Args:
        notes: what the forward shows.
        name: of the operator, without the underscore of one that writes in place.
        args: its positional arguments.
        given: the tensors among all arguments, each with what is known of it.
        made: the results.
    """

    notes: Notes
    name: str
    args: Sequence[Any]
    given: Sequence[tuple[torch.Tensor, Value]]
    made: Sequence[torch.Tensor]

    @property
    def values(self) -> list[Value]:
        """What is known of its tensors."""
        return [value for _, value in self.given]

    @property
    def flows(self) -> list[Value]:
        """What is known of the activations among them."""
        return [value for value in self.values if value.is_activation]

    @property
    def result(self) -> torch.Tensor:
        """The first result."""
        return self.made[0]

    def arg(self, at: int, default: Any) -> Any:
        """Return a positional argument.

        Args:
            at: its position.
            default: is returned where it was not given, or is None.
        """
        return self.args[at] if len(self.args) > at and self.args[at] is not None else default
