"""The plans of all groups of one optimizer, and the rates that they are chosen by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, override

import torch
from attrs import asdict

from megaopt_core.parallel import communicates
from megaopt_muon.choice.calibration import current_rates, current_share
from megaopt_muon.choice.first_rank import Need, agreed_rates
from megaopt_muon.choice.methods import MethodBook, is_narrow
from megaopt_muon.choice.plan_text import parsed_plan
from megaopt_muon.products.precision import compute_dtype

if TYPE_CHECKING:
    from megaopt_core.parallel import ProcessGroupCollection
    from megaopt_muon.choice.rates import Rates
    from megaopt_muon.newton_schulz.iteration import NewtonSchulz

__all__ = ["GroupBooks"]


class GroupBooks:
    """One book of methods a group, whose text stands in the group as `ns_plan`.

    Args:
        ns: how to orthogonalize.
        text: methods that are already chosen.

    Raises:
        ConfigurationError: the text cannot be read.
    """

    def __init__(self, ns: NewtonSchulz, text: str = "") -> None:
        self._ns = ns
        self._books: dict[int, MethodBook] = {}
        self._rates: Callable[[int], Rates] = current_rates
        self._share: Callable[[int], float] = current_share
        parsed_plan(text)  # an error in it is the constructor's

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: its groups are others."""
        return {**vars(self), "_books": {}}

    def of(self, group: dict[str, Any]) -> MethodBook:
        """Return the methods of a group: those that it says, which a checkpoint may have brought, or the forced one.

        Args:
            group: a parameter group, which says afterwards what is done.
        """
        text = group["ns_plan"]
        known = self._books.get(id(group))
        if known is None or known.text != text:
            ns, params = self._ns, group["params"]
            kind = _kind_of(ns, params[0]) if params else {"narrow": False}
            known = MethodBook(ns.method, ns.coefficients, text, self._rates, share=self._share, **kind)
            self._books[id(group)] = known
            group["ns_plan"] = known.text
        return known

    def agree(self, pg_collection: ProcessGroupCollection, params: Iterable[torch.Tensor]) -> None:
        """Choose from the rates of the first rank, on all ranks of the process groups: they all call it.

        Args:
            pg_collection: the process groups.
            params: this rank's parameters.

        Raises:
            ConfigurationError: `MEGAOPT_CALIBRATION` names a file that cannot be read.
            PluginError: this rank is the first, and cannot measure.
            RoutingError: another rank fails in one of these ways.
        """
        if any(communicates(group) for group in asdict(pg_collection, recurse=False).values()):
            agreed = agreed_rates(pg_collection, _need_of(self._ns, params))
            self._rates, self._share = agreed.rates_of, agreed.share_of
            self._books.clear()


def _kind_of(ns: NewtonSchulz, param: torch.Tensor) -> dict[str, bool]:
    """Return whether matrices go in 16 bits on a processor, in float32 for bfloat16, or in float16 elsewhere."""
    dtype = compute_dtype(ns.precision, param.dtype, param.device)
    return {
        "narrow": is_narrow(dtype, param.device),
        "relaxed": ns.stands_in(dtype),
        "half": ns.is_half(param.device),
    }


def _need_of(ns: NewtonSchulz, params: Iterable[torch.Tensor]) -> Need:
    """Return what is worth measuring for parameters; a matrix of so many elements has at most their root in rows."""
    narrow, rows = False, 0
    for param in params:
        if param.device.type == "cpu":
            dtype = compute_dtype(ns.precision, param.dtype, param.device)
            narrow = narrow or is_narrow(dtype, param.device)
            if dtype == torch.float32:
                rows = max(rows, math.isqrt(param.numel()))
    return Need(narrow, rows)
