"""What pieces of a cut model show of their states: parts of DTensors, and whole tensors with their owners."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from megaopt_core.parallel import communicates
from megaopt_core.params import Shard
from megaopt_fsdp.states.local import show_parts
from megaopt_fsdp.states.numbers import tell_numbers
from megaopt_fsdp.states.owned import brought_to_owners, tell_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DTensorStates"]


@frozen(eq=False)
class DTensorStates:
    """States as DTensors: cut like the local tensors that are stepped, or by rows where an owner keeps them whole.

    Args:
        owners: the ranks among which owners were chosen; None: there are none.
        of_all_params: local tensors are stepped, and owners keep the states of split steps alone; False: owners step.
    """

    owners: ProcessGroup | None
    of_all_params: bool

    def group(self, keys: frozenset[str]) -> ProcessGroup | None:
        """Return the ranks that own whole tensors, where owners keep states of them."""
        keeps = bool(keys) or not self.of_all_params
        return self.owners if keeps and communicates(self.owners) else None

    def show(
        self,
        params: Mapping[str, torch.nn.Parameter],
        states: Mapping[str, MutableMapping[str, Any]],
        keys: frozenset[str],
    ) -> None:
        """Make states DTensors, and show on every rank what owners keep."""
        if self.of_all_params:
            show_parts(params, states)
            tell_numbers(params, states)
        group = self.group(keys)
        if group is not None:
            tell_all(params, states, keys if self.of_all_params else None, group)

    def take(
        self,
        states: Mapping[str, Mapping[str, Any]],
        owned: Mapping[str, Sequence[Shard]],
        keys: frozenset[str],
    ) -> Mapping[str, Mapping[str, Any]]:
        """Return the states of which owners have theirs again."""
        group = self.group(keys)
        return (
            {}
            if group is None
            else brought_to_owners(states, owned, keys if self.of_all_params else None, group)
        )
