"""What ranks that train together choose by: what the first of them has stored, or measures for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen

from megaopt_core.errors import ConfigurationError, PluginError
from megaopt_core.parallel import ProcessGroupCollection, agree_over_ranks
from megaopt_muon.choice.calibration import nearest, probed_rates, stored_rates
from megaopt_muon.choice.onednn_share import probed_shares, share_for
from megaopt_muon.choice.rates import DEFAULT, Rates
from megaopt_muon.products.precision import multiplies_bfloat16

__all__ = ["Agreed", "Need", "agreed_rates"]

_WHAT = "choosing how Muon iterates"


@frozen
class Need:
    """What a rank's matrices make worth measuring.

    Args:
        narrow: some are iterated in bfloat16 on a processor.
        rows: that matrices have at most which are iterated in float32 on a processor; 0 where there are none.
    """

    narrow: bool = False
    rows: int = 0


@frozen
class Agreed:
    """Rates that all ranks choose by.

    Args:
        rates: at least one.
        shares: of the time of torch's own products in float32 that oneDNN's take, by rows from which on they hold.
    """

    rates: Sequence[Rates]
    shares: Mapping[int, float] = field(factory=dict)

    def rates_of(self, small: int) -> Rates:
        """Return the rates for matrices of a size.

        Args:
            small: the smaller dimension of the matrix.
        """
        return nearest(self.rates, small)

    def share_of(self, small: int) -> float:
        """Return oneDNN's part of the time of torch's own products; as long as these take where nobody has measured.

        Args:
            small: the smaller dimension of the matrix.
        """
        stored = self.rates_of(small).onednn
        return share_for(self.shares, small) if stored is None else stored


@frozen
class _Told:
    """What a rank tells before anything is measured."""

    rank: int
    stored: tuple[Rates, ...]
    need: Need
    is_deterministic: bool


def agreed_rates(pgs: ProcessGroupCollection, need: Need) -> Agreed:
    """Return what the first rank's stored calibration says, and what it measures where that says nothing.

    All ranks of the process groups take part; the others wait meanwhile. Nothing is measured, and rates are assumed,
    where torch is to be deterministic on any rank.

    Args:
        pgs: the process groups, of several ranks.
        need: what this rank's matrices make worth measuring.

    Raises:
        ConfigurationError: `MEGAOPT_CALIBRATION` names a file on this rank that cannot be read.
        PluginError: this rank, the first, cannot measure.
        RoutingError: another rank fails in one of these ways.
    """
    stored, error = tuple[Rates, ...](), None
    try:
        stored = stored_rates()
    except ConfigurationError as raised:
        error = raised
    mine = _Told(dist.get_rank(), stored, need, torch.are_deterministic_algorithms_enabled())
    told = agree_over_ranks(mine, pgs, _WHAT, error=error)
    stored, rank = told[0].stored, told[0].rank
    measured, unable = None, None
    if mine.rank == rank and not any(each.is_deterministic for each in told):
        need = Need(any(each.need.narrow for each in told), max(each.need.rows for each in told))
        try:
            measured = _measured(stored, need)
        except Exception as raised:  # noqa: BLE001 - others wait for this rank
            what = f"{type(raised).__name__}: {raised}"
            unable = PluginError(f"Muon cannot measure how fast this processor multiplies: {what}")
            unable.__cause__ = raised
    # Also where nothing is measured: ranks that have not met all others may think otherwise.
    given = agree_over_ranks(measured, pgs, _WHAT, error=unable)
    return next(filter(None, given), Agreed(stored or (DEFAULT,)))


def _measured(stored: tuple[Rates, ...], need: Need) -> Agreed | None:
    """Measure what is needed and not stored."""
    if stored:
        need = Need(rows=need.rows if any(rates.onednn is None for rates in stored) else 0)
    if need == Need():
        return None
    one = probed_rates() if need.narrow and multiplies_bfloat16() else DEFAULT
    return Agreed(stored or (evolve(one, onednn=None),), probed_shares(need.rows))
