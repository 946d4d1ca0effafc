"""State dicts in torch's schema of an optimizer whose ranks share states: slices that know what they are part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from megaopt_checkpoint.ranks import ALONE
from megaopt_checkpoint.restore.plan import plan_load
from megaopt_checkpoint.state_dicts.over_ranks import (
    brought_to_ranks,
    names_of_slices,
    refused_together,
    with_states_of_all,
)
from megaopt_checkpoint.state_dicts.source import lacking_state, torch_source
from megaopt_checkpoint.values.sliced import SlicedTensor, joined, sliced
from megaopt_core.errors import MegaoptError
from megaopt_core.precision import MAIN_PARAM
from megaopt_core.state import require_state, require_told, with_left_out

if TYPE_CHECKING:
    from megaopt_core.optimizers import MegatronOptimizer
    from megaopt_core.params import Shard

__all__ = ["SharedStateDict"]


@frozen(eq=False)
class SharedStateDict:
    """How the state dicts of one optimizer show what its ranks share.

    Args:
        optimizer: a built optimizer.
    """

    optimizer: MegatronOptimizer

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the state of every parameter by name: a collective where a strategy has a form for shared states."""
        optimizer = self.optimizer
        cut = optimizer.state.cut_names()
        as_slices = names_of_slices(optimizer).union(cut)
        shown = {
            name: {
                key: _shown(optimizer.state[param], key, name in as_slices) for key in optimizer.state[param]
            }
            for param, name in optimizer.names.items()
        }
        return with_states_of_all(optimizer, shown, cut)

    def load(self, state_dict: Mapping[str, Any], names: Sequence[str], *, strict: bool) -> set[str]:
        """Copy a state dict into the optimizer, after all of it has been checked: a collective as above.

        Args:
            state_dict: of torch's schema.
            names: of its parameters, in the order of its groups.
            strict: names must be the same on both sides.

        Returns:
            The parameters whose state has been loaded without a main value.

        Raises:
            MegaoptError: it does not fit; nothing has been changed on any rank.
        """
        optimizer = self.optimizer
        state_dict = brought_to_ranks(optimizer, state_dict, names)
        try:
            if strict:
                state_dict = with_left_out(optimizer, state_dict, names)
            source = torch_source(optimizer, state_dict, names)
            plan = plan_load(source, optimizer, strict=strict, ranks=ALONE)
            records = source.manifest.parameters
            if strict:
                require_told(state_dict["param_groups"], names)
                without = {
                    name for name, each in records.items() if not each["state"] and "fresh" not in each
                }
                require_state(optimizer, without, lacking_state(state_dict, names))
        except MegaoptError as error:
            # It raises, when the ranks that have the rest of the tensors have heard of it.
            refused_together(optimizer, error)
            raise
        refused_together(optimizer, None)
        plan.apply(ALONE)
        return {name for name, record in records.items() if record and MAIN_PARAM not in record["state"]}


def _shown(kept: Any, key: str, as_slices: bool) -> Any:
    part = _sliced(kept, key) if as_slices else None
    return kept.exported(key) if part is None else part


def _sliced(kept: Any, key: str) -> SlicedTensor | None:
    """Return a state as the part of the parameter's that it is; None where it has no element for each."""
    owned = kept.slices[0].owned
    if not kept.slices[0].piece.holds(key):
        if owned is None or not owned.is_elementwise(key, owned.inner.get(key)):
            return None
        return _part(owned.members[0][1], owned.inner[key])
    found = None
    for each in kept.slices:
        if not each.is_elementwise(key):
            return None
        found = joined(found, _part(each.shard, each.read(key)))
    return found


def _part(shard: Shard, value: torch.Tensor) -> SlicedTensor:
    elements = value.detach().reshape(-1)
    return sliced(shard, elements.dtype, elements.device, lambda: elements)
