"""The votes of a step, and how ranks meet: MAX over replicas, then flags on the sums of gradient statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from attrs import frozen

from megaopt_core.optimizers._gradients.statistics import wide_dtype
from megaopt_core.parallel._groups import ProcessGroupCollection, size_of
from megaopt_core.parallel._reduction import all_reduce
from megaopt_core.plugin_api._observers import VoteSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megaopt_core.optimizers._part import OptimizerPart

__all__ = [
    "BROUGHT",
    "FOUND_INF",
    "GRADIENT",
    "REFUSED",
    "Ballot",
    "Heard",
    "Sums",
    "add_up",
    "joins_unevenly",
]

REFUSED, FOUND_INF, BROUGHT, GRADIENT = "refused", "found_inf", "brought", "gradient"
"""The core's own votes: a rank cannot step; a gradient is not finite; somebody wrote values that only all ranks
together can bring to pieces; a parameter has a gradient."""

_CARRIED = frozenset({REFUSED, GRADIENT})
"""Votes that ride along where ranks meet, and that are no reason to meet."""

type Sums = Mapping[ProcessGroup | None, torch.Tensor]
"""For each group of ranks that adds up statistics, this rank's sums."""


@frozen(eq=False)
class Heard:
    """Sums and votes of a step, as every rank hears them.

    Args:
        values: on the device: sums over all parts and ranks, then a number for each of `flags`, above 0 where it fired.
        flags: names of the votes that only the device knows.
        known: votes that the host knows, by name.
    """

    values: torch.Tensor
    flags: Sequence[str]
    known: Mapping[str, bool]


@frozen(eq=False)
class Ballot:
    """The votes of every step, fixed at the build and equal on all ranks, and the ranks that they travel over.

    Votes are integers, which MAX reduces over replicas: *any* as 0 or 1, *equal* as n and -n. One flag a vote then
    rides on the SUM of each statistics group. Each such group holds `mp`, so that every rank hears the same. A step
    that adds nothing up reduces the flags over `mp`. In this order a difference between two replicas stops the ranks
    that hold other parts of the model, too.

    Args:
        any: names of the votes that fire where one rank says 1, those that stop a step last.
        equal: names of the votes that fire where replicas say different integers, those that stop a step first: the
            flags of votes that stop a step lie side by side.
        stops: names of the votes that stop a step.
        dense_dp: replicas of dense parameters.
        mp: ranks that hold other parts of the model.
        tells: there is more to tell than refusals, or somebody waits for a rank that refuses.
        is_observed: observers' votes are among them.
    """

    any: tuple[str, ...]
    equal: tuple[str, ...]
    stops: frozenset[str]
    dense_dp: ProcessGroup | None
    mp: ProcessGroup | None
    tells: bool
    is_observed: bool

    @classmethod
    def of(
        cls,
        parts: Sequence[OptimizerPart],
        pgs: ProcessGroupCollection,
        skips_nonfinite: bool,
        observed: Sequence[VoteSpec] | None,
    ) -> Ballot:
        """Return the votes of an optimizer's steps.

        Args:
            parts: the optimizer's parts.
            pgs: its process groups.
            skips_nonfinite: a gradient that is not finite stops a step.
            observed: the votes of observers; None: they are left out.
        """
        specs = [VoteSpec(REFUSED, "any", stops=True), VoteSpec(GRADIENT, "any")]
        if skips_nonfinite:
            specs.append(VoteSpec(FOUND_INF, "any", stops=True))
        if any(part.writes.is_together for part in parts):
            specs.append(VoteSpec(BROUGHT, "any"))
        specs += observed or ()
        names = [spec.name for spec in sorted(specs, key=lambda spec: spec.stops)]
        equal = {spec.name for spec in specs if spec.rule == "equal"}
        # A step brings parameters to other ranks, which would wait for a rank that refuses.
        shares_out = any(size_of(part.sharded.stats_group) > size_of(pgs.mp) for part in parts)
        return cls(
            tuple(name for name in names if name not in equal),
            tuple(name for name in reversed(names) if name in equal),
            frozenset(spec.name for spec in specs if spec.stops),
            pgs.dense_dp,
            pgs.mp,
            shares_out or not _CARRIED.issuperset(names),
            observed is not None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all votes, in the order of their flags."""
        return (*self.any, *self.equal)

    @property
    def meets_replicas(self) -> bool:
        """Whether replicas tell each other their votes."""
        return self.tells and size_of(self.dense_dp) > 1

    @property
    def hearers(self) -> ProcessGroupCollection:
        """The ranks that have heard a vote of this one, where any has."""
        return ProcessGroupCollection(dp=self.dense_dp if self.meets_replicas else None, mp=self.mp)

    def is_heard(self, sums: Sums) -> bool:
        """Return whether any other rank hears what this one says in a step.

        Args:
            sums: what the step adds up.
        """
        groups = (self.dense_dp, self.mp, *sums) if self.tells else sums
        return any(size_of(group) > 1 for group in groups)

    def exchange(self, said: Mapping[str, int | torch.Tensor], sums: Sums, device: torch.device) -> Heard:
        """Tell the other ranks, and hear from them; a collective where :meth:`is_heard`.

        Args:
            said: this rank's votes; one that is missing is neutral.
            sums: for each statistics group this rank's sums, which are added up in place.
            device: where statistics are gathered.
        """
        if not self.is_heard(sums):
            return self._alone(said, sums, device)
        votes = self._over_replicas(said, device)
        first = len(self.any)
        differ = votes[first::2] + votes[first + 1 :: 2] != 0
        flags = torch.cat([votes[:first], differ.to(votes)])
        if sums:
            carried = {group: torch.cat([own, flags.to(own)]) for group, own in sums.items()}
            values = add_up(carried, device)
        else:
            if size_of(self.mp) > 1:
                all_reduce(flags, self.mp, "the exchange of votes", dist.ReduceOp.MAX)
            values = flags
        return Heard(values, self.names, {})

    def _over_replicas(self, said: Mapping[str, int | torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the largest votes of all replicas: *any*, then for each *equal* the number and its negative."""
        numbers = [said.get(name, 0) for name in self.any]
        for name in self.equal:
            number = said.get(name, 0)
            numbers += [number, -number]
        plain = [0 if isinstance(number, torch.Tensor) else number for number in numbers]
        votes = torch.tensor(plain, dtype=torch.int64, device=device)
        for at, number in enumerate(numbers):
            if isinstance(number, torch.Tensor):
                votes[at] = number.squeeze()
        if self.meets_replicas:
            all_reduce(votes, self.dense_dp, "the comparison of ranks before a step", dist.ReduceOp.MAX)
        return votes

    def _alone(self, said: Mapping[str, int | torch.Tensor], sums: Sums, device: torch.device) -> Heard:
        """Return what a rank says to itself: only what its device has found is there to be read."""
        found = {name: said[name] for name in self.any if isinstance(said.get(name), torch.Tensor)}
        known = {
            name: name in self.any and bool(said.get(name, 0)) for name in self.names if name not in found
        }
        values = add_up(sums, device)
        if found:
            flags = [flag.reshape(1).to(values) for flag in found.values() if isinstance(flag, torch.Tensor)]
            values = torch.cat([values, *flags])
        return Heard(values, tuple(found), known)


def add_up(sums: Sums, device: torch.device) -> torch.Tensor:
    """Return sums over the ranks of each group, and over the groups; a collective where groups have several ranks.

    Args:
        sums: equally many for each group; they are reduced in place.
        device: where the result lives.
    """
    totals = None
    for group, own in sums.items():
        if size_of(group) > 1:
            all_reduce(own, group, "the reduction of gradient norms")
        totals = own if totals is None else totals + own
    return torch.empty(0, dtype=wide_dtype(device), device=device) if totals is None else totals


def joins_unevenly(chunk: torch.nn.Module) -> bool:
    """Return whether ranks step unequal numbers of times, and torch's `Join` stands in for those that have ended.

    Args:
        chunk: a model chunk.
    """
    return bool(getattr(getattr(chunk, "_join_config", None), "enable", False))
