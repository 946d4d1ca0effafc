"""How long work takes: operations, bytes and messages in seconds."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, gt

from megaopt_layerwise.planner.works import Work

__all__ = ["CostModel"]


@frozen
class CostModel:
    """What a planner weighs operations against exchanged bytes with.

    The defaults are round numbers for accelerators of 2023, eight in a node, and not measurements: give those of your
    machine where it matters.

    Args:
        operations_per_second: of a rank, in the units of `Work.cost`.
        node_ranks: consecutive ranks that share a fast network.
        node_bytes_per_second: that a rank sends inside such a node while it receives as many.
        bytes_per_second: the same between nodes.
        latency: seconds from the start of a message to its arrival.
        rounds: exchanges of peers in each step.

    Example:
        >>> model = CostModel(node_bytes_per_second=1e9, latency=1e-5, rounds=5)
        >>> model.exchange_seconds(1e6, peers=2)
        0.0011
    """

    operations_per_second: float = field(default=4e14, validator=gt(0))
    node_ranks: int = field(default=8, validator=ge(1))
    node_bytes_per_second: float = field(default=3e11, validator=gt(0))
    bytes_per_second: float = field(default=4e10, validator=gt(0))
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
        speed = self.node_bytes_per_second if self.node_ranks % peers == 0 else self.bytes_per_second
        return self.rounds * hops * self.latency + hops / peers * exchanged / speed

    def part_cost(self, work: Work, peers: int) -> float:
        """Return the operations of each of the peers that step a work together.

        Args:
            work: the work.
            peers: how many step it.
        """
        return work.cost * ((1.0 - work.repeated) / peers + work.repeated if peers > 1 else 1.0)

    def part_seconds(self, work: Work, peers: int) -> float:
        """Return the time of a step of each of the peers, with what they exchange.

        Args:
            work: the work.
            peers: how many step it; 1: it stays whole.
        """
        return self.compute_seconds(self.part_cost(work, peers)) + self.exchange_seconds(
            work.exchanged, peers
        )
