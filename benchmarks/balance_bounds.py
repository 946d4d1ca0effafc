"""What no plan of owners can do better: lower bounds, from which parts of matrices fit on one rank together."""

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from attrs import define, evolve, field
from megaopt_layerwise.planner import CostModel, Work

__all__ = ["Bounds"]

_MOST_PEERS = 64
_HALVINGS = 30
"""Of the interval that a bound lies in."""

_MIXTURES = torch.linspace(0.0, 1.0, 21, dtype=torch.float64)

type _Load = Callable[[Work, int], float]
"""What each of some peers has of a work."""


@define(eq=False)
class Bounds:
    """Lower bounds over all plans that share each matrix equally among any number of peers up to 64, on any ranks.

    A limit is too small where the parts of all matrices do not fit on the ranks within it. That is shown as for bins
    that are packed: a function gives every part a share of a rank, so that whatever fits on a rank together has shares
    of at most 1, and each matrix takes the number of peers whose shares are the least; more shares than ranks do not
    fit. Functions are `part / limit`; for any `k` up to half of the limit `1` for parts above `limit - k`, beside which
    nothing of `k` fits, `1 / floor(limit / k)` for other parts from `k` on, and 0 for smaller ones; and mixtures of
    both.

    Args:
        works: what is shared out.
        ranks: how many there are.
        model: weighs operations against what peers exchange.

    Example:
        >>> works = [Work(name, 4e14, numel=1, state_bytes=8) for name in "abc"]
        >>> round(Bounds(works, 2, CostModel()).step_seconds(), 6)
        2.0
    """

    works: Sequence[Work]
    ranks: int
    model: CostModel
    _kinds: Counter[Work] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._kinds = Counter()
        for work in self.works:
            cost, state = work.cost / work.matrices, work.state_bytes / work.matrices
            alone = evolve(work, name="", bucket=0, cost=cost, state_bytes=state, matrices=1)
            self._kinds[alone] += work.matrices

    def step_seconds(self, most_memory: float = math.inf) -> float:
        """Return a time that the step of every plan takes at least.

        Args:
            most_memory: bytes of state of the fullest rank over their mean that plans keep to.
        """
        mean = sum(work.state_bytes for work in self.works) / self.ranks
        return self._least(self.model.part_seconds, most_memory * mean)

    def operations(self) -> float:
        """Return operations of which some rank has as many in every plan, however fast peers exchange."""
        return self._least(self.model.part_cost, math.inf)

    def _least(self, load: _Load, room: float) -> float:
        parts = torch.full((len(self._kinds), _MOST_PEERS), math.inf, dtype=torch.float64)
        for at, work in enumerate(self._kinds):
            for peers in range(1, min(work.most_peers, _MOST_PEERS) + 1):
                if work.state_bytes / peers <= room:
                    parts[at, peers - 1] = load(work, peers)
        low, high = 0.0, sum(load(work, 1) * count for work, count in self._kinds.items())
        high = max(high, float(parts.amin(1).max()))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._overflows(parts, middle) else (low, middle)
        return low

    def _overflows(self, parts: torch.Tensor, limit: float) -> bool:
        """Return whether the parts cannot fit on the ranks within a limit."""
        fitting = parts.where(parts <= limit, math.inf)
        if bool(fitting.isinf().all(1).any()):
            return True
        sizes = fitting[fitting.isfinite()]
        half = torch.tensor([limit / 2], dtype=torch.float64)
        least = torch.cat([sizes, limit - sizes, half]).unique()
        least = least[(least > 0) & (least <= half)].view(-1, 1, 1)
        together = (limit / least * (1 + 1e-12)).floor()
        alone = fitting > limit - least
        counted = alone.double().where(alone, (fitting >= least) / together)
        filled = fitting / limit
        peers = torch.arange(1.0, _MOST_PEERS + 1, dtype=torch.float64)
        count = torch.tensor(list(self._kinds.values()), dtype=torch.float64)
        for mixture in _MIXTURES:
            share = (mixture * filled + (1 - mixture) * counted).where(fitting.isfinite(), math.inf)
            taken = (share * peers).amin(-1) @ count
            if float(taken.max()) > self.ranks * (1 + 1e-9):
                return True
        return False
