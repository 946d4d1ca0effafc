"""How long work takes: operations, bytes and messages in seconds."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt

__all__ = ["CostModel"]


@frozen
class CostModel:
    """What a planner weighs operations against exchanged bytes with.

    The defaults are round numbers for accelerators of 2023 in nodes with a fast network, not measurements: give those
    of your machine where it matters.

    Args:
        operations_per_second: of a rank, in the units of `Work.cost`.
        bytes_per_second: that a rank sends while it receives as many.
        latency: seconds from the start of a message to its arrival.
        rounds: exchanges of peers in each step.

    Example:
        >>> CostModel(bytes_per_second=1e9, latency=1e-5, rounds=5).exchange_seconds(1e6, peers=2)
        0.0011
    """

    operations_per_second: float = field(default=4e14, validator=gt(0))
    bytes_per_second: float = field(default=5e10, validator=gt(0))
    latency: float = field(default=1e-5, validator=ge(0))
    rounds: int = field(default=5, validator=ge(1))

    def compute_seconds(self, cost: float) -> float:
        """Return the time of some operations.

        Args:
            cost: operations.
        """
        return cost / self.operations_per_second

    def exchange_seconds(self, exchanged: float, peers: int) -> float:
        """Return the time in which peers add up some bytes: a ring that goes round twice in every round.

        Args:
            exchanged: bytes that are added up, of all rounds together.
            peers: how many ranks add them up.
        """
        if peers < 2:
            return 0.0
        hops = 2 * (peers - 1)
        return self.rounds * hops * self.latency + hops / peers * exchanged / self.bytes_per_second
