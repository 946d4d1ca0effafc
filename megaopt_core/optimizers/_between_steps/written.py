"""What a step has written to, told to autograd: a graph that saved a value then refuses to go back over a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import define, field

from megaopt_core.precision._policy import PrecisionPolicy
from megaopt_core.sharding._live_model import Piece

__all__ = ["StepWrites"]


@define(eq=False)
class StepWrites:
    """Counts one more write to each parameter that a step changes: those with a gradient, wherever they are stepped.

    Torch's fused kernels, flat memory and collectives count none. Without it, `loss.backward()` through a graph from
    before the step would take new weights for the old ones and say nothing.

    Args:
        pieces: what is stepped on this rank.
        groups: the public groups, with the parameters that other ranks step.
    """

    pieces: Sequence[Piece]
    groups: Sequence[Mapping[str, Any]]
    _elsewhere: list[torch.nn.Parameter] = field(init=False)
    _changed: list[torch.nn.Parameter] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        here = {id(each) for piece in self.pieces for each in piece.model_params}
        self._elsewhere = [each for group in self.groups for each in group["params"] if id(each) not in here]

    def expect(self, precision: PrecisionPolicy) -> None:
        """Remember what the step will change, whose gradients have been collected.

        Args:
            precision: has them.
        """
        stepped = [piece for index, piece in enumerate(self.pieces) if precision.grad(index) is not None]
        self._changed = [
            *(each for piece in stepped for each in piece.model_params),
            *(each for each in self._elsewhere if each.grad is not None or hasattr(each, "main_grad")),
        ]

    def count(self) -> None:
        """Count the writes of the step."""
        torch.autograd.graph.increment_version(self._changed)
        self._changed = []
